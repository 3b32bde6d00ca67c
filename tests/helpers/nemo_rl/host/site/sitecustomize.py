"""What NeMo-RL's trainers need to be imported on a machine without GPUs; loaded by every process, Ray's included."""

import sys
import types
import typing

if sys.version_info < (3, 12):
    # pydantic refuses typing.TypedDict as a field before Python 3.12; NeMo-RL asks for 3.13.
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

# Imported beside the trainers and used by the real Megatron workers only, which no test here starts.
sys.modules.setdefault("megatron.bridge", types.ModuleType("megatron.bridge"))
