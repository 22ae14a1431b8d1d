"""What stands between a model, a scheduler and the cache: a runner, a loop, prefill and decode servers."""
