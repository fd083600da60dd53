"""File names of labelled training material beyond those that tasks/code_lang.py knows: GitHub Linguist's table of extensions
and whole names (lib/linguist/languages.yml, MIT), those that one language alone uses. What others use as well needs a sign.

python -m pytest tests/tasks/test_code_lang.py
"""

from __future__ import annotations

import re

_EXTENSIONS = {
    "assembly": "a51 nas", "awk": "auk mawk nawk", "c": "idc", "c++": "cppm inl ino ixx tcc txx", "clojure": "boot cl2 cljx hic",
    "cobol": "ccp cpy", "coffeescript": "_coffee cjsx iced", "common lisp": "asd ny podsl sexp", "dockerfile": "containerfile",
    "emacs lisp": "emacs", "erlang": "escript xrl yrl", "glsl": "frg fsh fshader glslf glslv tesc tese vsh vshader",
    "groovy": "gvy gtpl", "haskell": "hs-boot", "haxe": "hxsl", "hcl": "nomad tofu", "html": "hta xht",
    "ini": "cnf container gitconfig lektorproject mount network prefs service socket target timer url", "java": "jav jsh",
    "javascript": "es6 jake jscad jsfl jslib jsm jss njs sjs ssjs xsjs xsjslib",
    "json": "avsc code-snippets code-workspace geojson gltf har jsonc jsonld mcmeta sarif sublime-build sublime-commands"
            " sublime-keymap sublime-menu sublime-settings sublime-project tfstate topojson webapp webmanifest",
    "kotlin": "ktm", "lua": "nse pd_lua rbxs wlua", "makefile": "make makefile mkfile",
    "markdown": "mdown mdwn mkd mkdn mkdown ronn",
    "matlab": "matlab", "nim": "nimble nimrod", "ocaml": "eliom eliomi ml4 mll mly",
    "perl": "perl ph plx psgi", "php": "ctp phps phpt",
    "postscript": "epsi", "prolog": "yap", "python": "gyp gypi lmi pyde tac wsgi", "r": "rsx", "racket": "rktl scrbl",
    "restructuredtext": "rest",
    "ruby": "builder eye god jbuilder mspec podspec prawn rabl rbi rbuild rbx ruby thor watchr",
    "scala": "kojo sbt", "scheme": "sps",
    "shell": "bats command ebuild eclass sbatch slurm tmux zsh-theme", "sql": "ddl mysql pgsql pkb pks pls plsql prc tps",
    "tex": "bbx cbx dtx ins lbx mkii mkiv mkvi", "tcl": "sdc tm xdc", "verilog": "veo", "vhdl": "vhf vhi vho vhs vht vhw",
    "vim script": "vimrc vmb", "visual basic": "dsr",
    "xml": "adml admx ant axaml axml builds ccproj clixml cproject cscfg csdef csproj dita ditamap fsproj fxml glade gpx grxml"
           " iml ivy jelly jsproj kml launch mxml natvis nproj nuspec osm pkgproj proj props ps1xml psc1"
           " pubxml qhelp resx rss scxml"
           " shproj storyboard sublime-snippet targets tmcommand tmlanguage tmpreferences tmsnippet"
           " tmtheme ui urdf ux vbproj vcxproj"
           " vsixmanifest vssettings vstemplate vxml wixproj wsdl wsf wxi wxl wxs x3d xacro xaml xib xlf"
           " xliff xmi xmp xproj"
           " xspec xul zcml",
    "yaml": "reek rviz sublime-syntax yaml-tmlanguage",
}  # fmt: skip
_NAMES = {
    "coffeescript": "cakefile", "elixir": "mix.lock", "emacs lisp": ".emacs .gnus .spacemacs _emacs cask eask",
    "erlang": "emakefile rebar.config rebar.lock",
    "ini": ".buckconfig .coveragerc .flake8 .gitconfig .gitmodules .gitreview .npmrc .pylintrc .wgetrc pylintrc buildozer.spec",
    "javascript": "jakefile",
    "json": ".all-contributorsrc .arcconfig .babelrc .c8rc .htmlhintrc .jscsrc .jshintrc .jslintrc .nycrc .swcrc .tern-project"
            " composer.lock deno.lock flake.lock package.resolved pipfile.lock",
    "lua": ".luacheckrc", "makefile": "bsdmakefile kbuild mkfile", "meson": "meson_options.txt", "nim": "nim.cfg",
    "perl": ".latexmkrc latexmkrc cpanfile makefile.pl rexfile", "php": ".php .php_cs .php_cs.dist",
    "python": ".gclient deps sconscript wscript", "r": ".rprofile",
    "ruby": ".irbrc .pryrc .simplecov appraisals berksfile brewfile buildfile capfile dangerfile fastfile guardfile jarfile"
            " podfile puppetfile snapfile steepfile thorfile vagrantfile",
    "shell": ".bash_aliases .bash_functions .bash_logout .bash_profile .bashrc .cshrc .envrc .flaskenv .kshrc .login .profile"
             " .tmux.conf .xinitrc .xsession .zlogin .zlogout .zprofile .zshenv .zshrc apkbuild"
             " bash_aliases bash_logout"
             " bash_profile bashrc cshrc gradlew kshrc login mvnw pkgbuild profile tmux.conf xinitrc"
             " xsession zlogin zlogout zprofile zshenv"
             " zshrc",
    "text": "fontlog keep.me read.me",
    "toml": "cargo.toml.orig gopkg.lock pdm.lock uv.lock",
    "vim script": ".exrc .gvimrc .nvimrc .vimrc _vimrc gvimrc nvimrc",
    "xml": ".classpath .cproject .project", "yaml": ".clang-format .clang-tidy .clangd .gemrc yarn.lock",
}  # fmt: skip
BY_EXTENSION = {ext: language for language, exts in _EXTENSIONS.items() for ext in exts.split()}
BY_NAME = {name: language for language, names in _NAMES.items() for name in names.split()}
# What a file of the language has for certain, where other kinds of files bear the same names.
_SIGNS = {
    "xml": re.compile(r"\A\s*<"), "json": re.compile(r"\A\s*[\[{/]"), "ini": re.compile(r"^\[[^\]\n]+\]\s*$", re.M),
    "erlang": re.compile(r"^[{\[%]|\bend\b|->", re.M), "html": re.compile(r"<"),
}  # fmt: skip
# Papers that projects carry under these names, whatever stands behind the dot (README.linux, LICENSE.mysql).
_PAPERS = frozenset(
    "authors bugs changelog changes contributors copying copyright credits faq history hacking install installing licence license"
    " maintainers news notice patents readme release-notes releasing thanks todo version warranty".split()
)


def by_name(name: str, text: str) -> str:
    """Language of a file by its whole name or extension (`name` in lower case, no folder), "" where they don't settle it."""
    stem, _, extension = name.rpartition(".")
    language = BY_NAME.get(name) or (BY_EXTENSION.get(extension, "") if stem else "")
    if not language and name.endswith(".app.src"):
        language = "erlang"
    if not language and name.startswith(("makefile.", "gnumakefile.")) and extension != "pl":
        language = "makefile"
    if language in _SIGNS and not _SIGNS[language].search(text):
        return ""
    return language


def is_paper(name: str) -> bool:
    """Whether a file with an extension no language has is a project's plain text: `readme.linux`, `license.mysql`, `news`."""
    return name.split(".", 1)[0] in _PAPERS
