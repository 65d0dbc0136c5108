"""Engines in processes of their own."""
