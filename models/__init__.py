"""Configurations, layers, families and weights: a model as values that know their layout."""
