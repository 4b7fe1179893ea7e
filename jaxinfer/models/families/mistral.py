"""Mistral (arXiv:2310.06825), without its sliding window."""

from __future__ import annotations

from jaxinfer.models.families.llama import LLAMA

MISTRAL = LLAMA
