"""Drydock's library: configuration, data, parallel layers, training and evaluation."""
