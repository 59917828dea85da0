"""Rules of style that no linter knows, each with a control: a sample that breaks it is seen.

A checker takes the text of one file and returns what is wrong with it, one line per finding.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("transfer", "tiers", "attention", "kvhold")
LIBRARY = ("transfer", "tiers", "attention")

FUNCTION_LINES = 70
FILE_LINES = 400

# The one place per kind of outside where an exception of any class may arrive and must become a
# fact about buffers. Each needs its reason.
BROAD_EXCEPT = {
    "transfer/_boundary.py": "whatever a device or a hook raised decides what became of buffers",
    "transfer/_workers.py": "whatever a part of an operation raised, its thread has returned",
    "transfer/_thread.py": "what ended the loop's thread is raised by whoever joins it",
}

# Put together here so that this file does not contain them.
LEFTOVERS = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "py" + "torch.org/whl",
    "registry.npm" + "js.org",
    "deb.deb" + "ian.org",
    "proxy.go" + "lang.org",
    "/wo" + "rk/",
)
SERIALISERS = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})

Checker = Callable[[str], list[str]]


def long_functions(text: str) -> list[str]:
    """Find functions of more than `FUNCTION_LINES` lines, decorators not counted."""
    return [
        f"line {node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def long_file(text: str) -> list[str]:
    """Find a file of more than `FILE_LINES` lines."""
    length = len(text.splitlines())
    return [f"{length} lines, at most {FILE_LINES}"] if length > FILE_LINES else []


def leftovers(text: str) -> list[str]:
    """Find marks of unfinished work."""
    pattern = re.compile(r"\b(" + "|".join(LEFTOVERS) + r")\b")
    return [
        f"line {number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := pattern.search(line))
    ]


def foreign_hosts(text: str) -> list[str]:
    """Find names of package registries and paths of one person's machine."""
    return [
        f"line {number}: {word}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in HOSTS
        if re.search(r"(?<![\w.])" + re.escape(word) if word[0] == "/" else re.escape(word), line)
    ]


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a chain of attributes, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _only_warns(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        asks = not any(
            isinstance(node, ast.Call) and dotted(node.func) not in {"getattr", "isinstance"}
            for node in ast.walk(statement.test)
        )
        return asks and all(map(_only_warns, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.Expr):
        value = statement.value
        is_warning = isinstance(value, ast.Call) and dotted(value.func) in {"warnings.warn", "warn"}
        return is_warning or isinstance(value, ast.Constant)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Return) and statement.value is None
    )


def acting_finalisers(text: str) -> list[str]:
    """Find a `__del__` that does more than warn."""
    return [
        f"line {statement.lineno}: __del__ may only call warnings.warn"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__del__"
        for statement in node.body
        if not _only_warns(statement)
    ]


def _caught(node: ast.expr | None) -> Iterator[str]:
    if node is None:
        yield "BaseException"
    elif isinstance(node, ast.Tuple):
        for element in node.elts:
            yield from _caught(element)
    else:
        yield dotted(node).removeprefix("builtins.")


def broad_excepts(text: str) -> list[str]:
    """Find handlers and suppressions of Exception, BaseException or everything."""
    broad = {"Exception", "BaseException"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and broad & set(_caught(node.type)):
            found.append(f"line {node.lineno}: catches too much")
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
            names = {name for argument in node.args for name in _caught(argument)}
            if broad & names:
                found.append(f"line {node.lineno}: suppresses too much")
    return found


def environment(text: str) -> list[str]:
    """Find reads and writes of environment variables."""
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and dotted(node) in names:
            found.append(f"line {node.lineno}: {dotted(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [
                f"line {node.lineno}: from os import {alias.name}"
                for alias in node.names
                if f"os.{alias.name}" in names
            ]
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def code_in_data(text: str) -> list[str]:
    """Find ways to read bytes that can run code: pickle and what is built on it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        found += [
            f"line {getattr(node, 'lineno', 0)}: imports {name}"
            for name in _imported(node)
            if name.split(".")[0] in SERIALISERS
        ]
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in {"torch.load", "torch.save"}:
            found.append(f"line {node.lineno}: {dotted(node.func)}")
        found += [
            f"line {node.lineno}: allow_pickle"
            for keyword in node.keywords
            if keyword.arg == "allow_pickle"
            and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        ]
    return found


def family(module: str) -> str:
    """Return the test file that a family of the program's modules may share.

    The modules of one command, as `demo.py`, `demo_faults.py` and `demo_report.py`, are parts of one
    thing and may be tested as one.
    """
    path = Path(module)
    return (path.parent / f"test_{path.stem.split('_')[0]}.py").as_posix()


def mirror(module: str) -> str | None:
    """Return the test file that a module of src needs, or None where it needs none.

    Args:
        module: its path below src, as `transfer/_state.py`.
    """
    path = Path(module)
    if path.name in {"__init__.py", "__main__.py"} or "testing" in path.parts:
        return None
    if path.parts[:2] == ("kvhold", "integrations"):
        return None
    return (path.parent / f"test_{path.stem.lstrip('_')}.py").as_posix()


def missing_mirrors(modules: list[str], tests: set[str]) -> list[str]:
    """Find the modules whose test file is missing."""
    return [
        f"src/{module} needs tests/{wanted}"
        for module in modules
        if (wanted := mirror(module)) is not None
        and wanted not in tests
        and not (module.startswith("kvhold/") and family(module) in tests)
    ]


def python_files(*packages: str) -> list[str]:
    """List the modules of packages, as paths below src."""
    return sorted(
        path.relative_to(SOURCE).as_posix()
        for package in packages
        for path in (SOURCE / package).rglob("*.py")
    )


def project_files() -> list[str]:
    """List the texts that people write, as paths below the root."""
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".css", ".svg", ".csv"}
    written = [path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE"]
    for folder in ("src", "tests", "docs", ".ci"):
        written += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in written
        if path.suffix in suffixes or path.name in {"Makefile", "run", ".gitignore"}
        if "_build" not in path.parts
    )


def findings(checker: Checker, root: Path, names: list[str]) -> list[str]:
    """Run a checker over files."""
    return [
        f"{name}: {finding}"
        for name in names
        for finding in checker((root / name).read_text(encoding="utf-8"))
    ]


def test_every_rule_sees_what_it_forbids(subtests: pytest.Subtests) -> None:
    body = "    pass\n"
    samples: list[tuple[Checker, str, str]] = [
        (long_functions, "def f():\n" + body * 70, "def f():\n" + body * 69),
        (long_functions, "async def f():\n" + body * 70, "@d\nasync def f():\n" + body * 69),
        (long_file, "a = 1\n" * 401, "a = 1\n" * 400),
        (leftovers, "a = 1  # " + LEFTOVERS[0] + ": later", "# a method"),
        (leftovers, LEFTOVERS[2], LEFTOVERS[2] + "L"),
        (foreign_hosts, "see https://" + HOSTS[0] + "/x", "see PyPI"),
        (foreign_hosts, "read " + HOSTS[-1] + "a", "see docs" + HOSTS[-1] + "a"),
        (
            acting_finalisers,
            "class A:\n def __del__(self):\n  self.close()",
            "class A:\n def __del__(self):\n  '''D'''\n  if self.a:\n   warnings.warn('a')",
        ),
        (
            acting_finalisers,
            "class A:\n def __del__(self):\n  if self.close():\n   warnings.warn('a')",
            "class A:\n def __del__(self):\n  if getattr(self, 'a', 0):\n   warnings.warn('a')",
        ),
        (acting_finalisers, "class A:\n def __del__(self):\n  self.a = None", "def close(): pass"),
        (broad_excepts, "try: f()\nexcept: pass", "try: f()\nexcept OSError: pass"),
        (broad_excepts, "try: f()\nexcept Exception: pass", "try: f()\nfinally: pass"),
        (broad_excepts, "try: f()\nexcept (A, BaseException): pass", "raise Exception"),
        (broad_excepts, "try: f()\nexcept* Exception: pass", "try: f()\nexcept* A: pass"),
        (broad_excepts, "with contextlib.suppress(Exception): f()", "with suppress(A): f()"),
        (environment, "a = os.environ['A']", "a = environ['A']"),
        (environment, "from os import getenv", "from os import sysconf"),
        (code_in_data, "import pickle", "import pickletools"),
        (code_in_data, "from marshal import loads", "from json import loads"),
        (code_in_data, "a = torch.load(p, weights_only=True)", "a = load(p)"),
        (code_in_data, "np.load(p, allow_pickle=True)", "np.load(p, allow_pickle=False)"),
    ]
    for checker, bad, good in samples:
        with subtests.test(checker.__name__, bad=bad):
            assert len(checker(bad)) == 1
            assert checker(good) == []


def test_a_missing_test_file_is_seen() -> None:
    modules = [
        "transfer/_state.py",
        "transfer/__init__.py",
        "transfer/testing/_sim.py",
        "kvhold/integrations/vllm.py",
        "kvhold/plots/lines.py",
    ]
    assert missing_mirrors(modules, {"transfer/test_errors.py"}) == [
        "src/transfer/_state.py needs tests/transfer/test_state.py",
        "src/kvhold/plots/lines.py needs tests/kvhold/plots/test_lines.py",
    ]
    present = {"transfer/test_state.py", "kvhold/plots/test_lines.py"}
    assert missing_mirrors(modules, present) == []


def test_something_is_checked() -> None:
    assert "transfer/__init__.py" in python_files(*PACKAGES)
    assert {"Makefile", "README.md", "tests/test_tidy.py", ".ci/run"} <= set(project_files())


def test_functions_are_short() -> None:
    assert findings(long_functions, SOURCE, python_files(*PACKAGES)) == []


def test_files_are_short() -> None:
    assert findings(long_file, SOURCE, python_files(*PACKAGES)) == []


def test_every_module_has_its_test_file() -> None:
    tests = {path.relative_to(ROOT / "tests").as_posix() for path in ROOT.glob("tests/**/*.py")}
    missing = missing_mirrors(python_files(*PACKAGES), tests)
    assert not missing, "\n" + "\n".join(missing)


def test_nothing_is_left_over() -> None:
    assert findings(leftovers, ROOT, project_files()) == []


def test_no_registry_or_private_path_is_named() -> None:
    assert findings(foreign_hosts, ROOT, project_files()) == []


def test_finalisers_only_warn() -> None:
    assert findings(acting_finalisers, SOURCE, python_files(*PACKAGES)) == []


def test_exceptions_are_caught_by_name() -> None:
    inside = [name for name in python_files(*PACKAGES) if name not in BROAD_EXCEPT]
    assert findings(broad_excepts, SOURCE, inside) == []


def test_the_library_reads_no_environment() -> None:
    assert findings(environment, SOURCE, python_files(*LIBRARY)) == []


def test_no_bytes_are_run() -> None:
    assert findings(code_in_data, SOURCE, python_files(*PACKAGES)) == []
