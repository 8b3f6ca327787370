"""Ray Train: session, reduction, admission, coordinator actor, trainer."""
