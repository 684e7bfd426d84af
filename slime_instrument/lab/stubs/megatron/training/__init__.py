"""Stands in for the part of Megatron-LM's ``megatron.training`` that slime imports, which is on no package index."""
