"""Kernels over [rows, vocabulary] logits."""
