"""What is known beforehand about languages that identifiers mix up: label aliases, scripts, alphabets, function words.

All of it is general knowledge of orthography and grammar; the only measured table is conf/langid.json (tasks/langid_fit.py).
"""

from __future__ import annotations

import re

# Other codes and variants of one language, as cld2, lid.176 and corpora write them.
_ALIASES = {
    "iw": "he", "in": "id", "jw": "jv", "mo": "ro", "nb": "no", "sh": "sr", "fil": "tl", "cmn": "zh", "arb": "ar",
    "zlm": "ms", "khk": "mn", "pes": "fa", "swh": "sw", "lvs": "lv", "ekk": "et", "azj": "az", "als": "sq",
}  # fmt: skip


def normalize(code: str) -> str:
    """ISO 639 code without script or region, aliases resolved (`zh-Hant` -> `zh`, `iw` -> `he`, `nb` -> `no`)."""
    code = code.partition("-")[0].partition("_")[0]
    return _ALIASES.get(code, code)


# Written forms of one language continuum: a vote for one member supports the others.
_GROUPS = {"bs": "sr", "hr": "sr", "ms": "id", "nn": "no", "wuu": "zh", "yue": "zh", "azb": "az", "ckb": "ku"}


def group(language: str) -> str:
    return _GROUPS.get(language, language)


# Languages of the web at large; any other needs stronger evidence (its prior is lower).
COMMON = frozenset(
    "af ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn ko ky la"
    " lg lt lv mi mk ml mn mr ms my ne nl nn no pa pl ps pt ro ru si sk sl sn so sq sr st sv sw ta te tg th tl tn tr ts tt"
    " uk ur uz vi xh yo zh zu".split()
)

_CYRILLIC = frozenset("абвгдежзийклмнопрстуфхцчшщъыьэюяёђѓєѕіїјљњћќѝўџґѐ")
_ALPHABETS = {
    "ru": "абвгдежзийклмнопрстуфхцчшщъыьэюяё",
    "bg": "абвгдежзийклмнопрстуфхцчшщъьюяѝ",
    "mk": "абвгдѓежзѕијклљмнњопрстќуфхцчџшѐѝ",
    "sr": "абвгдђежзијклљмнњопрстћуфхцчџш",
    "uk": "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя",
    "be": "абвгдеёжзійклмнопрстуўфхцчшыьэюя",
}
# Letters that a language does not write, among those of its relatives.
FOREIGN = {language: _CYRILLIC - frozenset(letters) for language, letters in _ALPHABETS.items()} | {
    "cs": frozenset("ľĺŕôäąęłćńś"), "sk": frozenset("ěřůąęłćńś"), "pl": frozenset("ěřůčšžľť"), "sl": frozenset("ćđěřůáéíýľ"),
    "hr": frozenset("ěřůáéíýľ"), "bs": frozenset("ěřůáéíýľ"), "da": frozenset("äößðþ"), "no": frozenset("äößðþ"),
    "nn": frozenset("äößðþ"), "sv": frozenset("æøßðþ"), "de": frozenset("åæøñãõ"), "fo": frozenset("äöåß"),
    "es": frozenset("ãõêâàèòçîôœ"), "gl": frozenset("ãõêâàèòçîôœ"), "pt": frozenset("ñèìòùîœ"), "ca": frozenset("ñãõêâîôœ"),
    "fr": frozenset("ñãõáíóúìò"), "it": frozenset("ñãõêâçôœ"), "ga": frozenset("àèìòùçñâêôäöåø"), "gd": frozenset("áíúçñâêôäöåø"),
    "et": frozenset("åøæñçáéíóú"), "fi": frozenset("õüøæñçáéíóú"), "tr": frozenset("əäåæøõ"), "az": frozenset("äåæøõ"),
    "ro": frozenset("ãõñêôäöåøæ"), "nl": frozenset("åøæñãõß"), "af": frozenset("åøæñãõß"),
}  # fmt: skip
LETTER_BEYOND_ASCII = re.compile("[\u00df-\u024f\u0430-\u045f\u0491]")
CYRILLIC = re.compile("[\u0430-\u045f]")

# Function words (and clitics) that tell members of a confusable set apart; shared words are left out on purpose.
_WORDS = {
    "da": "af blev efter mig dig sig noget nogle meget hvad hvem op ud nu kun sagde siger uden mellem hun nogen dem havde være"
    " mod ved haft hvor bliver skulle øl gør selv måske",
    "no": "av ble etter meg deg seg noe noen mye hva hvem opp ut nå bare sa sier uten mellom hun enn dem hadde være mot ved"
    " hatt hvor blir skulle gjør selv kanskje fra",
    "nn": "ikkje eg ein eit kva kven frå vart etter meg deg noko nokon mykje berre seier utan mellom ho dei hadde vere mot"
    " korleis kvar blir skulle gjer sjølv kanskje",
    "sv": "av och inte jag är efter mig dig något några mycket vad vem upp ut nu bara sade säger utan mellan hon än dem hade"
    " vara mot från blev blir att som för på till ett",
    "nl": "de het een niet van voor zijn ik met en dat ook maar wordt werd deze door bij naar heeft zij wij hij ze je uit"
    " over nog kan hebben",
    "af": "die nie 'n ’n is vir wat hulle sy het van en dat ook maar word hierdie deur by na ons hy jy uit oor nog kan sal"
    " moet baie om",
    "es": "el los las y del una es con por para como su más pero fue lo en que al son muy esta este no",
    "gl": "o os as e do da unha é con por para como seu máis pero foi en que ao son moi esta este non dos das no na",
    "pt": "o os as e do da uma é com por para como seu mais mas foi em que ao são muito esta este não dos das no na",
    "ca": "el els les i del una és amb per com seu més però fou va en que al són molt aquesta aquest no dels la un"
    " han d'un s'ha",
    "oc": "lo los las e del una es amb per coma son mai mas foguèt en que al son fòrça aquela aqueste non dels la un",
    "it": "il gli le e del una è con per come suo più ma fu in che al sono molto questa questo non dei della di nel",
    "fr": "le les et du une est avec pour comme son plus mais fut en que au sont très cette ce ne pas des de dans la",
    "cs": "se je že jsem jsou který která které být nebo jako aby ale také při už jen jeho ve ze byl byla bylo pro má po"
    " však ještě roku",
    "sk": "sa je že som sú ktorý ktorá ktoré byť alebo ako aby ale tiež pri už len jeho vo zo bol bola bolo pre má po však"
    " ešte roku",
    "sl": "se je da sem so ki kateri biti ali kot ampak tudi pri že le njegov v iz bil bila bilo za ima po vendar še leta in"
    " na ne bi pa",
    "hr": "se je da sam su koji koja koje biti ili kao ali također pri već samo njegov u iz bio bila bilo za ima po no još i"
    " na ne bi od",
    "mk": "се е дека сум се кој која кое да или како но исто при веќе само негов во од беше за има по уште и на не би со го ги"
    " ќе што овој ова",
    "sr": "се је да сам су који која које бити или као али такође при већ само његов у из био била било за има по још и на не"
    " би од са ће",
    "bg": "се е че съм са който която което да или като но също при вече само негов в от беше за има по още и на не би с го ги"
    " ще тази това този",
    "ru": "с и что это как но также при уже только его в из был была было за по еще ещё на не бы от к для который она он они",
    "xh": "ukuba kwaye okanye kunye yaye ngoku xa kuba le lo ke kodwa apho nje ukuze phantsi ngaphandle emva kwi",
    "zu": "ukuthi futhi noma kanye ngoba lapho uma njengoba le lo ke kodwa manje nje ukuze phansi ngaphandle emva ngesikhathi",
    "st": "ho le ba ka ya e o mme hore tsa wa se ke ha kapa ena bona hae tla sa hobane leha",
    "tn": "go le ba ka ya e o mme gore tsa wa se ke fa kgotsa ene bone gagwe tla sa ka gonne le fa mo",
    "id": "yang dan di ini itu dengan untuk tidak dari dalam akan pada juga bisa karena saat kepada mereka adalah",
    "en": "the of and to in is that for it was with as on be by this are from or have not which at an",
}  # fmt: skip
WORDS = {language: frozenset(words.split()) for language, words in _WORDS.items()}
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|['’]n\b")

CODE_MARKS = re.compile(r"[{}()<>\[\];=_/\\|&^%$#@*+~`]")
MOJIBAKE = re.compile("[ÃÂÅÐÑØÙâ][\u0080-\u00bf\u0152\u0153\u0160\u0161\u2018-\u203a\u20ac\u2122]|\ufffd")
