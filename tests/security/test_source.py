"""What the code never does, read from the code itself: no pickle, no remote code, no shell, no unsafe YAML."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "flows", "tasks", "training")
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.save", "yaml.load", "yaml.unsafe_load"}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Line and words for each thing that the project does not do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"imports {a.name}") for a in node.names if a.name in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_MODULES:
            yield node.lineno, f"imports {node.module}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, words) for words in wrong_call(node))


def wrong_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in FORBIDDEN_CALLS:
        yield f"calls {name}"
    if name in ("torch.load", "np.load", "numpy.load"):
        safe, wanted = ("weights_only", True) if name == "torch.load" else ("allow_pickle", False)
        value = given.get(safe)
        if (not isinstance(value, ast.Constant) or value.value is not wanted) and (name == "torch.load" or value):
            yield f"calls {name} without {safe}={wanted}"
    for argument, harm in (("trust_remote_code", True), ("shell", True)):
        value = given.get(argument)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is not harm):
            yield f"passes {argument}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_dangerous_call_in(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = [f"{file.relative_to(ROOT)}:{line} {words}" for file in files for line, words in findings(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "torch.save(x, f)",
        "yaml.load(f)",
        "subprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=anything)",
        "eval('1')",
    ],
)
def test_each_would_be_found(planted: str) -> None:
    assert list(findings(planted)), planted


@pytest.mark.parametrize(
    "harmless",
    ["torch.load(f, weights_only=True)", "np.load(f)", "subprocess.run(['ls'])", "f(trust_remote_code=False)"],
)
def test_the_harmless_is_not(harmless: str) -> None:
    assert not list(findings(harmless))
