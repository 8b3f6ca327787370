"""The commit protocol: log, manifests, generations, coordinator. Pure Python; no Ray, no torch."""
