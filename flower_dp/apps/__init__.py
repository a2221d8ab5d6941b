"""The Flower App: federated learning with differential privacy, on real data."""
