"""What a gate in a pod installs: a promise to those who run it, and to those who audit it."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PROMISED = {"uvloop", "httptools", "msgspec", "prometheus-client", "pyyaml"}

IMPORT_EVERYTHING = '''
import importlib, importlib.abc, pkgutil, sys

allowed = set(sys.argv[1:])

class Only(importlib.abc.MetaPathFinder):
    """Finds what is allowed; everything else is not installed."""

    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in allowed | sys.stdlib_module_names:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

sys.meta_path[:] = [Only(list(sys.meta_path))]
for top in ("sluicegate_core", "sluicegate_sidecar"):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, f"{top}."):
        importlib.import_module(module.name)
        print(module.name)
'''


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}


def closure(roots: set[str]) -> set[str]:
    """The distributions that an installation of `roots` brings here, without extras."""
    found: set[str] = set()
    todo = set(roots)
    while todo:
        name = todo.pop()
        found.add(name)
        for one in map(Requirement, requires(name) or []):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                todo |= {canonicalize_name(one.name)} - found
    return found


def imports_of(wanted: set[str]) -> Iterator[str]:
    """The top-level modules that the wanted distributions carry."""
    for module, carriers in packages_distributions().items():
        if any(canonicalize_name(carrier) in wanted for carrier in carriers):
            yield module


def test_a_plain_install_pulls_nothing() -> None:
    assert PROJECT["dependencies"] == []


def test_a_sidecar_install_pulls_what_the_gate_needs_and_nothing_else() -> None:
    assert names(PROJECT["optional-dependencies"]["sidecar"]) == PROMISED


def test_every_module_of_the_gate_is_imported_with_nothing_else_there() -> None:
    allowed = {"sluicegate_core", "sluicegate_sidecar", *imports_of(closure(PROMISED))}
    assert {"yaml", "httptools"} <= allowed
    assert allowed.isdisjoint({"sluicegate_lab", "pytest", "numpy", "rich", "kopf", "kubernetes"})
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *sorted(allowed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    files = {
        ".".join(path.relative_to(ROOT / "sidecar").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "sidecar").rglob("*.py")
    }
    assert imported | {"sluicegate_core", "sluicegate_sidecar"} == files


def test_every_dependency_is_pinned_and_no_registry_is_named() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r"[a-z0-9._-]+==[^\s;@/]+( ; [^/@]+)?", pin), pin
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    stated = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)}
    stated |= {name for group in groups.values() for name in names(group)}
    stated.discard("sluicegate")
    pinned = {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    assert stated <= pinned
    installed = {canonicalize_name(one.name) for one in distributions()}
    assert closure(stated & installed) <= pinned | {"sluicegate"}
