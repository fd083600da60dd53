"""Programming languages by content: snippets in 40 languages, mis-named files, non-code; the trainer on a small corpus."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks import (
    code_lang,
    code_lang_clean,
    code_lang_fit,
    code_lang_model,
    code_lang_names,
    code_lang_samples,
    code_lang_syntax,
)
from tasks.code_lang_model import CodeLanguageModel
from tasks.code_lang_samples import Sample

_PARTS = re.split(r"^=== (.+)\n", (Path(__file__).parent / "code_snippets.txt").read_text("utf-8"), flags=re.M)
SNIPPETS = dict(zip(_PARTS[1::2], _PARTS[2::2]))


def test_snippets_are_named_by_content_alone():
    wrong = {want: code_lang.identify(text) for want, text in SNIPPETS.items() if code_lang.identify(text)[0] != want}
    assert len(SNIPPETS) >= 40 and len(wrong) <= 0.1 * len(SNIPPETS), wrong


@pytest.mark.parametrize("text", ["", "   \n\n", "\0\0\0\x01\x02ELF\0", "\ufffd" * 40])
def test_no_language_in_nothing_and_in_binary_data(text):
    assert code_lang.identify(text) == ("", 0.0)


def test_prose_and_plain_numbers_are_no_programming_language():
    prose = "The committee met on Tuesday and agreed on nothing. It will meet again when the weather is better.\n" * 3
    assert code_lang.identify(prose)[0] in ("text", "markdown", "restructuredtext")
    assert code_lang.detect("notes.unseen", prose) == ("", "unknown")


def test_content_vetoes_a_wrong_extension_and_only_a_clearly_wrong_one():
    haskell, python = SNIPPETS["haskell"] * 6, SNIPPETS["python"] * 6
    assert code_lang.detect("a/Main.hs", haskell) == ("haskell", "extension")
    assert code_lang.detect("a/main.php", haskell) == ("haskell", "content against extension")
    assert code_lang.detect("a/main.swift", SNIPPETS["erlang"] * 6) == ("erlang", "content against extension")
    assert code_lang.detect("a/main.swift", python[:60]) == ("swift", "extension")  # too little to judge
    assert code_lang.detect("a/main.agda", haskell)[0] == "agda"  # the model has no Agda: nothing to compare
    assert code_lang.detect("a.js", SNIPPETS["typescript"] * 6)[0] == "javascript"  # relatives: the name decides
    assert code_lang.detect("a/main.unseen", python) == ("python", "content")
    assert code_lang.detect("a/data.unseen", SNIPPETS["json"] * 4) == ("data", "content")


def test_tokens_and_features():
    assert code_lang_model.tokens("if (a1 >= 0x1F) {\n\t\tFooBar.x_y();") == [
        "\n", "if", "(", "a1", ">=", "0x1F", ")", "{", "\n ", "FooBar", ".x_y", "();",
    ]  # fmt: skip
    assert [code_lang_model.shape(t) for t in ("0x1F", "foo", "FooBar", "fooBar", "x_y", "MAX_LEN", "OK", "$name", "=>")] == [
        "0", "a", "Aa", "aA", "a_a", "A_A", "A", "$a", "=>",
    ]  # fmt: skip
    counts = code_lang_model.features("if x\nif yy", frozenset({"if", "\n"}))
    assert counts == {"\n": 2, "if": 2, "a": 2, "\n\x1fif": 2, "if\x1fa": 2, "a\x1f\n": 1}


def samples():
    out = []
    for package in ("one-1.0", "two-2.0", "three-1"):
        for i in range(6):
            out.append(
                Sample("python", package, f"p{i}.py", f"def f{i}(x):\n    return x + {i}\n\nprint(f{i}(2))\n" * 3)
            )
            out.append(
                Sample("c", package, f"c{i}.c", f"#include <stdio.h>\nint f{i}(int x) {{\n  return x + {i};\n}}\n" * 3)
            )
    return out


def test_the_trainer_learns_and_repeats_itself(tmp_path):
    for name in ("a", "b"):
        code_lang_fit.fit(samples(), tmp_path / name, (50, 80, 4))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    model = CodeLanguageModel(tmp_path / "a")
    report = code_lang_fit.evaluate(model.identify, samples())
    assert {language: share for language, (_, share, _) in report.items()} == {"c": 1.0, "python": 1.0}
    assert model.identify("\0binary") == ("", 0.0) and model.probabilities("€").sum() == 0


def test_damaged_models_are_named(tmp_path):
    (tmp_path / "x").write_bytes(b"no model")
    save_file({"out": np.zeros(3)}, tmp_path / "y", {"languages": json.dumps(["c"])})
    for name in ("x", "y", "absent"):
        with pytest.raises(ValueError, match=f"{name}: not a code language model"):
            CodeLanguageModel(tmp_path / name)


def test_samples_are_read_labelled_and_drawn_from_packages(tmp_path):
    package = tmp_path / "shop-1.2"
    files = {
        "src/a.py": SNIPPETS["python"], "src/copy.py": SNIPPETS["python"], "Cargo.toml": SNIPPETS["toml"],
        "x.unseen": SNIPPETS["go"],
        "tests/languages/bash/a.test": "echo hello brave world $HOME\n" + "-" * 40 + '\n[["x"]]\n', "b.py": "x\n",
    }  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = list(code_lang_samples.read_packages([package], frozenset({"python", "toml", "go", "shell"})))
    assert [(s.language, s.package) for s in found] == [("python", "shop"), ("shell", "shop"), ("toml", "shop")]
    assert found[1].text == "echo hello brave world $HOME\n"
    cuts = list(code_lang_samples.crops(found[0], 5, seed=1))
    assert cuts == list(code_lang_samples.crops(found[0], 5, seed=1)) and all(c in found[0].text for c in cuts)


def test_c_headers_that_speak_to_cpp_compilers_are_c():
    guarded = "#ifdef __cplusplus\n{}\n#endif\n"
    header = (
        "#ifndef A_H\n"
        + guarded.format('extern "C" {')
        + "int area(int width, int height);\n"
        + guarded.format("}")
        + "#endif\n"
    )
    for text in (header, header.replace("#ifdef __c", "# if defined(__c").replace("__cplusplus\n", "__cplusplus)\n")):
        assert code_lang.label_by_name("a/area.h", text)[0] == "c"
    both = header.replace('extern "C" {', 'extern "C" {\nclass Hidden;\nnamespace a {').replace("\n}\n", "\n}}\n")
    assert code_lang.label_by_name("a/area.h", both)[0] == "c"  # C++ between the guards alone
    assert code_lang.label_by_name("a/area.h", header + "namespace shapes {\nint x;\n}\n")[0] == "c++"


def test_pascal_and_puppet_share_an_extension():
    pascal = "{ units are programs }\nunit Shapes;\ninterface\nprocedure Draw(x: integer);\nimplementation\nend.\n"
    puppet = (
        "# begin with this unit of the program\nclass shapes (\n  $x = 1,\n) {\n  file { '/a': ensure => present }\n}\n"
    )
    assert (
        code_lang.label_by_name("a.pp", pascal)[0] == "pascal"
        and code_lang.label_by_name("a.pp", puppet)[0] == "puppet"
    )
    languages = frozenset({"pascal", "puppet", "ini", "visual basic"})
    assert code_lang_samples.label("x/a.pp", pascal, languages) == "pascal"
    assert code_lang_samples.label("x/a.cfg", "set a 1\nset b 2\n", languages) == ""
    assert code_lang_samples.label("x/a.cfg", "[part]\na = 1\n", languages) == "ini"
    assert code_lang_samples.label("x/a.bas", '10 PRINT "HELLO"\n20 GOTO 10\n', languages) == ""
    assert (
        code_lang_samples.label("x/a.bas", "Option Explicit\nPublic Sub Main()\nEnd Sub\n", languages) == "visual basic"
    )
    assert code_lang_samples.label("samples/Pascal/x.inc", pascal, languages) == "pascal"  # Linguist's own label


def test_copies_of_held_out_files_are_not_trained_on():
    lines = [f"    result_{i} = compute_the_value({i})\n" for i in range(20)]
    notice = "".join(f"# You may redistribute this file, clause {i}\n" for i in range(10))
    held = [Sample("python", f"held-{n}", "a.py", notice + f"unique_name_of_the_file_{n} = {n}\n") for n in range(6)]
    held.append(Sample("python", "held", "b.py", notice + "".join(lines)))
    kept = Sample("python", "a", "other.py", notice + "".join(x.replace("compute", "derive") for x in lines))
    copies = [
        Sample("python", "a", "same.py", held[-1].text),
        Sample("python", "a", "part.py", "".join(lines[:12])),  # its own lines are the other's
        Sample("python", "a", "longer.py", "".join(lines[5:]) + kept.text),  # most of the other's
    ]
    assert code_lang_samples.without_copies([*copies, kept], held) == [kept]


def test_a_model_says_what_it_was_made_from(tmp_path):
    about = {"sources": [{"archive": "one-1.0.tar.gz", "sha256": "ab", "licence": "MIT", "files": 12}]}
    code_lang_fit.fit(samples(), tmp_path / "m", (50, 80, 4), about=about)
    model = CodeLanguageModel(tmp_path / "m")
    assert model.about["sources"] == about["sources"] and model.about["files"] == {"c": 18, "python": 18}
    assert model.about["seed"] == 0 and model.languages == ["c", "python"]


def test_features_of_one_package_alone_are_not_learned():
    counts, names = code_lang_fit.matrix([{"both": 1, "mine": 1}] * 8 + [{"both": 1}] * 8)
    packages = ["a"] * 8 + ["b"] * 8
    chosen = code_lang_fit.select(counts, names, ["c"] * 8 + ["d"] * 8, np.ones(16), packages, 5)
    assert [names[i] for i in chosen] == ["both"]


@pytest.mark.parametrize(
    ("name", "text", "language"),
    [
        ("a.sbt", "x", "scala"), (".bashrc", "x", "shell"), ("makefile.am", "x", "makefile"), ("makefile.pl", "x", "perl"),
        ("a.service", "[Unit]\nA=b\n", "ini"), ("a.service", "no sections", ""), ("a.props", "<Project/>", "xml"),
        ("a.props", "key=value", ""), ("x.app.src", "{application, x, []}.", "erlang"), ("a.unseen", "x", ""),
    ],
)  # fmt: skip
def test_labels_by_name_and_sign(name, text, language):
    assert code_lang_names.by_name(name, text) == language


def test_a_second_look_settles_or_drops_labels():
    def settled(language, path, text):
        return code_lang_clean.settled(Sample(language, "p", path, text))

    assert settled("text", "a/CMakeLists.txt", "project(x)") == "cmake"
    assert settled("verilog", "a.v", "module main\nfn main() {\n}\n") == ""
    assert settled("verilog", "a.v", "module m;\nendmodule\n") == "verilog"
    assert (
        settled("makefile", "control.in", "Source: x\n") == ""
        and settled("makefile", "Makefile.in", "a: b\n") == "makefile"
    )
    assert settled("c", "a.c", "{% if x %}\nint x;\n{% endif %}\n") == "" and settled("c", "a.c", "int x;\n") == "c"
    assert settled("csv", "a.csv", "a,b\n1,2\n") == "csv" and settled("csv", "a.csv", "no\ncommas\n") == ""
    assert settled("verilog", "samples/Verilog/a.v", "x") == "verilog"  # labelled by hand


def test_c_headers_of_cpp_projects_are_left_out():
    header = [Sample("c", "p", "a.h", "int area(int w);\n")]
    cpp, c = [Sample("c++", "p", f"{n}.cpp", "class A {};") for n in "ab"], Sample("c", "p", "a.c", "int x;")
    assert list(code_lang_clean.clean([*header, *cpp, c])) == [*cpp, c]
    assert list(code_lang_clean.clean([*header, cpp[0], c])) == [*header, cpp[0], c]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("[Unit]\nDescription=A thing\n# why\n\n[Service]\nExecStart=/bin/true\n", "ini"),
        ("; settings\n[core]\n\teditor = vim\n[alias]\n\tst = status\n", "ini"),
        ('[package]\nname = "x"\n', "toml"), ("[Serializable]\npublic class X { int a = 1; }\n", ""),
        ("  def total(xs: List[Int]): Int = xs.sum\n", "scala"), ("def total(xs: list) -> int:\n    return sum(xs)\n", ""),
    ],
)  # fmt: skip
def test_structure_of_settings_and_of_scala(text, language):
    assert code_lang_syntax.distinctive(text) == language


@pytest.mark.parametrize(
    ("found", "text", "instead"),
    [
        ("restructuredtext", "Notes\n=====\n\nIt was late.\n", "text"), ("restructuredtext", "See ``x``.\n", "restructuredtext"),
        ("vala", "#include <glib.h>\n", "c"), ("elm", "area :: Int -> Int\n", "haskell"), ("f#", "let x: Double = 1\n", "swift"),
        ("makefile", "alias ll='ls -l'\n", "shell"), ("makefile", "all:\n\tif x; then y; \\\n\tfi\n", "makefile"),
    ],
)  # fmt: skip
def test_relatives_are_parted_by_their_syntax(found, text, instead):
    assert code_lang_syntax.relative(found, text) == instead
