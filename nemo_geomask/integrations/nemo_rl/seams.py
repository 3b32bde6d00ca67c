"""Where NeMo-RL builds and calls its policy loss and starts its workers: as data, checked against its source.

A version number says little here (NeMo-RL's main calls itself 0.6.0), so the installed source itself is read. Nothing
of NeMo-RL is imported for it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect as runtime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.errors import GeomaskError, MissingDependencyError
from nemo_geomask.integrations.nemo_rl.commit import commit_of

__all__ = [
    "BEFORE_STEP",
    "HIDDEN_STATES",
    "LOSS_CLASS",
    "LOSS_MODULE",
    "PREV_LOGPROBS",
    "RECORD",
    "SCORING",
    "SEAMS",
    "TESTED",
    "WORKER_CODE",
    "SeamError",
    "SeamState",
    "Uses",
    "inspect",
    "require",
    "targets",
    "version",
]

TESTED = "v0.6.0, v0.7.0 and main of August 2026"
LOSS_MODULE = "nemo_rl.algorithms.loss.loss_functions"
LOSS_CLASS = "ClippedPGLossFn"
_LOSS_PACKAGE = "nemo_rl.algorithms.loss"


class SeamError(GeomaskError, RuntimeError):
    """The installed NeMo-RL builds or calls its policy loss in a way that is not known here."""


@dataclass(frozen=True)
class Signature:
    """A method whose parameters this package relies on.

    Attributes:
        module: where it is defined.
        path: dotted path inside the module, ``Class.method``.
        accepted: the parameter lists known, each name with its stars.
    """

    module: str
    path: str
    accepted: tuple[tuple[str, ...], ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.path}({', '.join(self.accepted[-1])})"

    def problem(self, tree: ast.Module) -> str | None:
        """What differs in the source, or None."""
        node: ast.AST | None = tree
        for name in self.path.split("."):
            node = next((child for child in _body(node) if getattr(child, "name", None) == name), None)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "is not defined there"
        found = tuple(_parameters(node.args))
        if found in self.accepted:
            return None
        return f"takes ({', '.join(found)})"


@dataclass(frozen=True)
class Builder:
    """A module that builds the policy loss by calling NeMo-RL's class.

    Attributes:
        module: the module.
        optional: not every tested version has the module.
    """

    module: str
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module} builds {LOSS_CLASS}(cfg)"

    def problem(self, tree: ast.Module) -> str | None:
        """What differs in the source, or None."""
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_LOSS_PACKAGE)
            for alias in node.names
            if alias.name == LOSS_CLASS
        }
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        ]
        if not calls:
            return f"does not call {LOSS_CLASS} from {_LOSS_PACKAGE}"
        known = {"cfg", "use_fused_linear_logprobs"}
        for call in calls:
            keywords = {keyword.arg for keyword in call.keywords}
            starred = any(isinstance(argument, ast.Starred) for argument in call.args)
            if starred or not keywords <= known or not 1 <= len(call.args) + len(keywords) <= 2:
                return f"calls {ast.unparse(call)}"
        return None


@dataclass(frozen=True)
class Uses:
    """Functions that single settings need: of a class, or of a module.

    Attributes:
        module: where they are defined.
        owner: the class; empty for functions of the module.
        methods: what is wrapped, with the parameters relied on.
        settings: what needs it.
        calls: what else is called.
        optional: not every tested version has ``methods``; it has all of them or none.
        last: parameters that the methods end with, which are told by their place.
    """

    module: str
    owner: str
    methods: Mapping[str, tuple[str, ...]]
    settings: str
    calls: tuple[str, ...] = ()
    optional: bool = False
    last: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Dotted name of the class or the module."""
        return f"{self.module}.{self.owner}".rstrip(".")

    def __str__(self) -> str:
        return f"{self.place}: {', '.join(self.names)} (for {self.settings} only)"

    @property
    def names(self) -> tuple[str, ...]:
        """Of all functions."""
        return (*self.methods, *self.calls)

    def present(self, found: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether this version has what is optional; ``found``: parameters of those of ``names`` that it defines."""
        return not self.optional or any(name in found for name in self.methods)

    def difference(self, found: Mapping[str, tuple[str, ...]]) -> str | None:
        """What differs in functions with these parameters, by name; or None."""
        if not self.present(found):
            return None
        for name in self.names:
            if name not in found:
                return f"{self.place}.{name} is not defined"
            missing = [parameter for parameter in self.methods.get(name, ()) if parameter not in found[name]]
            if missing:
                return f"{self.place}.{name} takes ({', '.join(found[name])}), without {', '.join(missing)}"
            if name in self.methods and self.last != found[name][len(found[name]) - len(self.last) :]:
                return f"{self.place}.{name} takes ({', '.join(found[name])}), not {', '.join(self.last)} at the end"
        return None

    def in_source(self, tree: ast.Module) -> dict[str, tuple[str, ...]]:
        """Parameters of those of ``names`` that the source defines."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        nodes = [node for owner in owners for node in _body(owner)]
        return {
            node.name: tuple(_parameters(node.args))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in self.names
        }

    def require(self, found: Mapping[str, tuple[str, ...]], *, otherwise: str) -> None:
        """Stop unless functions with these parameters are as known.

        Raises:
            SeamError: what differs, and what to set instead (``otherwise``).
        """
        difference = self.difference(found)
        if difference:
            raise SeamError(
                f"NeMo-RL {version()} is not as nemo_geomask knows it (tested: {TESTED}): {difference}. {otherwise}, "
                "or use a tested NeMo-RL"
            )

    def require_of(self, home: Any, *, otherwise: str) -> None:
        """As :meth:`require`, of :attr:`module`, imported."""
        target = getattr(home, self.owner, None) if self.owner else home
        self.require(self.in_memory(target), otherwise=otherwise)

    def in_memory(self, target: Any) -> dict[str, tuple[str, ...]]:
        """Parameters of those of ``names`` that the class or module defines."""
        members = {} if target is None else vars(target)
        return {name: tuple(runtime.signature(members[name]).parameters) for name in self.names if name in members}


_CREATE_WORKER = ("self", "placement_group", "placement_group_bundle_index", "num_gpus", "bundle_indices")
_WORKER_GROUP = (
    *("self", "cluster", "remote_worker_builder", "workers_per_node", "name_prefix"),
    *("bundle_indices_list", "sharding_annotations", "env_vars"),
)

SEAMS: tuple[Signature | Builder, ...] = (
    Signature(
        LOSS_MODULE,
        f"{LOSS_CLASS}.__init__",
        (("self", "cfg"), ("self", "cfg", "use_fused_linear_logprobs")),
    ),
    Signature(
        LOSS_MODULE,
        f"{LOSS_CLASS}.__call__",
        (("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),),
    ),
    Builder("nemo_rl.algorithms.grpo"),
    Builder("nemo_rl.algorithms.ppo", optional=True),
    Builder("nemo_rl.algorithms.single_controller_utils.setup", optional=True),
    Signature(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerBuilder.IsolatedWorkerInitializer.__init__",
        (("self", "ray_actor_class_fqn", "*init_args", "**init_kwargs"),),
    ),
    Signature(
        "nemo_rl.distributed.worker_groups",
        "RayWorkerBuilder.IsolatedWorkerInitializer.create_worker",
        ((*_CREATE_WORKER, "**extra_options"), (*_CREATE_WORKER, "num_gpus_per_node", "**extra_options")),
    ),
    Signature("nemo_rl.distributed.worker_groups", "RayWorkerGroup.__init__", (_WORKER_GROUP,)),
    Signature("nemo_rl.distributed.worker_groups", "RayWorkerGroup.workers", (("self",),)),
)
"""All that this package relies on; v0.6.0 has neither PPO nor the single controller, v0.7.0 no single controller."""


@dataclass(frozen=True)
class SeamState:
    """One seam in the installed NeMo-RL.

    Attributes:
        seam: the seam, in words.
        problem: what differs, None where nothing does.
        absent: this NeMo-RL has no such module, and needs none.
    """

    seam: str
    problem: str | None = None
    absent: bool = False


_TQ = ("nemo_rl.models.policy.tq_policy", "TQPolicy")
_DATA_PLANE = ("read_from_dataplane", "write_to_dataplane")
_VETO = "a step's metrics, loss_fn.batch_veto, denominator: kept, budgets and record"
BEFORE_STEP = (
    Uses("nemo_rl.models.policy.lm_policy", "Policy", {"train": ("data", "loss_fn")}, _VETO),
    Uses(*_TQ, {"train_from_meta": ("meta", "loss_fn")}, _VETO, _DATA_PLANE, optional=True),
    Uses(
        *_TQ,
        {"begin_train_step": ("loss_fn",), "train_microbatches_from_meta": ("meta",), "finish_train_step": ()},
        _VETO,
        (*_DATA_PLANE, "abort_train_step"),
        optional=True,
    ),
)
"""Where a batch is handed to the workers; v0.6.0 has no data plane, v0.7.0 none that is streamed into."""

_ANCHOR = "loss_fn.ratio_anchor: gen"
PREV_LOGPROBS = (
    Uses("nemo_rl.models.policy.lm_policy", "Policy", {"get_logprobs": ("data",)}, _ANCHOR),
    Uses(*_TQ, {"get_logprobs_from_meta": ("meta",)}, _ANCHOR, _DATA_PLANE, optional=True),
    Uses(
        "nemo_rl.algorithms.grpo",
        "",
        {"compute_and_apply_seq_logprob_error_masking": ("train_data", "seq_logprob_error_threshold")},
        _ANCHOR,
    ),
)
"""Who is asked for ``prev_logprobs``, and who masks by them; nothing else asks for them."""

_ESTIMATORS = ("GRPO", "GDPO", "ReinforcePlusPlus", "RawReward", "Generalized", "OPD")
RECORD = tuple(
    Uses(
        "nemo_rl.algorithms.advantage_estimator",
        f"{name}AdvantageEstimator",
        {"compute_advantage": ("rewards",)},
        "loss_fn.record",
        optional=True,
    )
    for name in _ESTIMATORS
)
"""Who hears a batch's rewards; v0.6.0 has three of them."""

_LOGIT = "loss_fn.logprob_backend"
_PACKING = "loss_fn.logprob_backend and packed rows in one call"
_GROUPS = ("vocab_parallel_group", "context_parallel_group")
_UNPACKING = {
    "__init__": (
        *("loss_fn", "prepare_fn", "cu_seqlens_q", "cu_seqlens_q_padded", "vocab_parallel_rank"),
        *_GROUPS,
    ),
    "__call__": ("next_token_logits", "data", "global_valid_seqs", "global_valid_toks"),
}
_WRAPPERS = "nemo_rl.algorithms.loss.wrapper"
_PREPARE = ("logits", "data", "loss_fn", *_GROUPS, "sampling_params")
WORKER_CODE = (
    Uses("nemo_rl.algorithms.loss.utils", "", {"prepare_loss_input": _PREPARE}, _LOGIT),
    Uses(_WRAPPERS, "SequencePackingLossWrapper", _UNPACKING, _PACKING),
    Uses(_WRAPPERS, "SequencePackingFusionLossWrapper", _UNPACKING, _PACKING),
)
"""Where a worker turns logits into what a loss takes, and unpacks packed rows."""

_SHARDS = ("vocab_parallel_logits", "target", "vocab_start_index", "vocab_end_index")
_AUTOMODEL = "nemo_rl.models.automodel.train"
_MODEL_UTILS, _SCORED = "nemo_rl.distributed.model_utils", f"{_LOGIT}: geomask"
SCORING = (
    Uses(_MODEL_UTILS, "DistributedLogprob", {"forward": _SHARDS}, _SCORED, last=("group", "inference_only")),
    Uses(
        _MODEL_UTILS,
        "ChunkedDistributedLogprob",
        {"forward": (*_SHARDS, "chunk_size")},
        _SCORED,
        last=("tp_group", "inference_only"),
    ),
    Uses(_AUTOMODEL, "LogprobsPostProcessor", {"_compute_local_logprobs": ("self", "logits", "input_ids")}, _SCORED),
)
"""What makes log-probs of a vocabulary shard's logits, forward only where it is told so by its last argument; and of a
whole vocabulary's in a DTensor v2 worker."""

_MEGATRON = "nemo_rl.models.megatron.train"
_HIDDEN = "loss_fn.logprob_backend: geomask_linear"
HIDDEN_STATES = (
    Uses(
        _MEGATRON,
        "",
        {"forward_with_post_processing_fn": ("model", "post_processing_fn"), "model_forward": ("model",)},
        _HIDDEN,
    ),
    Uses(
        _MEGATRON,
        "LogprobsPostProcessor",
        {"__call__": ("data_dict", "input_ids", "cu_seqlens_padded")},
        _HIDDEN,
    ),
    Uses(_AUTOMODEL, "", {"forward_with_post_processing_fn": ("model", "post_processing_fn")}, _HIDDEN),
    Uses(_AUTOMODEL, "LossPostProcessor", {"__init__": ("cp_size",)}, _HIDDEN),
    Uses(_AUTOMODEL, "LogprobsPostProcessor", {"__init__": ("cp_size", "sampling_params")}, _HIDDEN),
    Uses(_MODEL_UTILS, "", {"get_logprobs_from_vocab_parallel_logits": ("input_ids",)}, _HIDDEN),
)
"""Where a worker runs its model, and a Megatron one makes log-probs of what that puts out."""

_WORKERS = "nemo_rl.models.policy.workers.dtensor_policy_worker"
DTENSOR_WORKERS = {_WORKERS: False, f"{_WORKERS}_v2": True}
"""Modules of the workers whose models are of transformers; whether functions around the call say what it is for."""


def inspect() -> list[SeamState]:
    """Compare every seam with the source of the installed NeMo-RL, those of single settings included.

    Raises:
        MissingDependencyError: there is no NeMo-RL.
    """
    root = _root()
    return [
        _compare(seam, root)
        for seam in (*SEAMS, *BEFORE_STEP, *PREV_LOGPROBS, *RECORD, *WORKER_CODE, *SCORING, *HIDDEN_STATES)
    ]


def require() -> None:
    """Stop unless the seams that every run relies on are as known.

    Raises:
        SeamError: one differs; the message names it, the version found and those tested.
        MissingDependencyError: there is no NeMo-RL.
    """
    root = _root()
    broken = [finding for finding in (_compare(seam, root) for seam in SEAMS) if finding.problem]
    if broken:
        listed = "\n".join(f"  {finding.seam}: {finding.problem}" for finding in broken)
        raise SeamError(
            f"NeMo-RL {version()} ({root}) is not as nemo_geomask knows it (tested: {TESTED}), and a loss selected "
            f"by loss_fn.name might not be the one that trains:\n{listed}\n"
            "Use a tested NeMo-RL, or a nemo_geomask that knows this one"
        )


def targets(needed: Iterable[Uses], *, otherwise: str) -> Iterator[tuple[Uses, Any]]:
    """The classes and modules, imported, of those that this version has.

    Raises:
        SeamError: one is not as known; ``otherwise`` says what to set instead.
    """
    for uses in needed:
        try:
            target = importlib.import_module(uses.module)
            target = getattr(target, uses.owner) if uses.owner else target
        except (ImportError, AttributeError):
            # The data plane has requirements of its own.
            if uses.optional:
                continue
            raise
        found = uses.in_memory(target)
        if uses.present(found):
            uses.require(found, otherwise=otherwise)
            yield uses, target


def version() -> str:
    """``nemo_rl.__version__``, or ``of unknown version``; with the commit where that is known.

    Between releases, NeMo-RL's main calls itself by the last release's number.
    """
    module = importlib.import_module("nemo_rl")
    number = str(getattr(module, "__version__", "of unknown version"))
    place = getattr(module, "__file__", None)
    commit = commit_of(Path(place).parent.parent) if place else None
    return f"{number} (commit {commit[:9]})" if commit else number


def _root() -> Path:
    spec = importlib.util.find_spec("nemo_rl")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        # PyPI's nemo_rl is an empty placeholder.
        if (Path(location) / "algorithms").is_dir():
            return Path(location)
    raise MissingDependencyError(
        "NeMo-RL is not importable here; run this in NeMo-RL's own environment (uv run … in its checkout), or put the "
        "checkout on PYTHONPATH. See docs/nemo_rl.md"
    )


def _compare(seam: Signature | Builder | Uses, root: Path) -> SeamState:
    parts = seam.module.split(".")[1:]
    path = root.joinpath(*parts).with_suffix(".py")
    if not path.is_file():
        return SeamState(str(seam), absent=True) if seam.optional else SeamState(str(seam), "there is no such module")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if isinstance(seam, Uses):
        found = seam.in_source(tree)
        return SeamState(str(seam), seam.difference(found), absent=not seam.present(found))
    return SeamState(str(seam), seam.problem(tree))


def _body(node: ast.AST | None) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    yield from (argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (argument.arg for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"
