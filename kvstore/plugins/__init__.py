"""Adapters: one thin package for each engine that loads and stores through kvstore."""
