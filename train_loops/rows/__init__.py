"""Traces -> training rows and their batches."""
