"""Inference engines alone and with remote experts."""
