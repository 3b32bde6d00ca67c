"""Adapters to NeMo-RL, Megatron-core, vLLM and libraries of log-prob kernels; each is imported only when used."""
