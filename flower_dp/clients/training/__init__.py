"""Local training with torch: records, recipes, per-record gradients and engines."""
