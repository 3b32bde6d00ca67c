"""``patched_attributes.py``: which attributes of the importable NeMo-RL are replaced, and whether they are put back.

Imports every module of NeMo-RL that can be imported. Prints a JSON object: for each case, the attributes that differ
from NeMo-RL's own, and those that still do after ``uninstall()``.
"""

import importlib
import json
import pkgutil
import sys
import types

from nemo_geomask import build_loss, install, uninstall
from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.hosts.nemo_rl.facts import POLICY
from nemo_geomask.hosts.nemo_rl.host_patches import PATCH_GROUPS, make_patches, needs_preparation, prepare_worker
from nemo_geomask.hosts.nemo_rl.policies import convert_policy
from tests.helpers.nemo_rl.absent_library import AbsentLibrary

MISSING = ("megatron.bridge", "nemo_automodel")
"""Libraries of NeMo-RL's workers that may be missing here; what is imported from them are empty classes."""


def import_everything():
    package = importlib.import_module("nemo_rl")
    for module in pkgutil.walk_packages(package.__path__, "nemo_rl.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except BaseException:  # some require other libraries, and raise errors of their own
            sys.modules.pop(module.name, None)


def held(owner):
    return {**vars(owner), "__class__": type(owner)}


def snapshot():
    """What every module and class of NeMo-RL holds, by owner."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "nemo_rl"]
    values = {id(value): value for module in modules for value in list(vars(module).values())}.values()
    classes = [value for value in values if isinstance(value, type) and value.__module__.startswith("nemo_rl")]
    return {owner: held(owner) for owner in [*modules, *classes]}


def differences(before):
    """The attributes that differ from a snapshot; a function that several modules have imported is one attribute."""
    missing = object()
    changed = {}
    for owner, attributes in before.items():
        now = held(owner)
        for name in attributes.keys() | now.keys():
            original = attributes.get(name, missing)
            if original is not now.get(name, missing):
                is_module = isinstance(owner, types.ModuleType)
                place = owner.__name__ if is_module else f"{owner.__module__}.{owner.__name__}"
                key = (place, name) if original is missing else id(original)
                changed.setdefault(key, []).append(f"{place}.{name}")
    return list(changed.values())


def start_driver():
    main = sys.modules["__main__"]
    main.setup = importlib.import_module("nemo_rl.algorithms.grpo").setup
    install()
    policy_class = getattr(importlib.import_module(POLICY[0]), POLICY[1])
    convert_policy(object.__new__(policy_class), build_loss({"name": "gspo"}).config)


def prepare(backend, has_packed_rows):
    config = build_loss({"name": "gspo", "logprob_backend": backend}).config
    if needs_preparation(config, has_packed_rows=has_packed_rows):
        assert prepare_worker(backends=(backend,), has_packed_rows=has_packed_rows)


def apply_all():
    prepare("geomask_linear", True)
    patch.apply_all(list(make_patches(["asynchronous record"])))


CASES = {
    "driver": start_driver,
    "worker, padded rows": lambda: prepare("nemo_rl", False),
    "worker, packed rows": lambda: prepare("nemo_rl", True),
    "worker, geomask, padded rows": lambda: prepare("geomask", False),
    "worker, geomask_linear, packed rows": lambda: prepare("geomask_linear", True),
    "all": apply_all,
}


def main():
    sys.modules.pop("megatron.bridge", None)
    sys.meta_path += [AbsentLibrary(library, lambda name: type(name, (), {})) for library in MISSING]
    import_everything()
    report = {"modules": sum(name.split(".")[0] == "nemo_rl" for name in sys.modules), "cases": {}}
    report["listed"] = [f"{module}.{path}" for group in PATCH_GROUPS.values() for module, path, _ in group.attributes]
    for name, start in CASES.items():
        before = snapshot()
        start()
        during = differences(before)
        uninstall()
        report["cases"][name] = [during, differences(before)]
    print("report:" + json.dumps(report))


if __name__ == "__main__":
    main()
