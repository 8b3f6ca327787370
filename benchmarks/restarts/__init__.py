"""One job under Ray Train's own checkpoints and under ours, each killing its workers."""
