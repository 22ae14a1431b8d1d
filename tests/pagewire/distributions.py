"""`DISTRIBUTIONS`: the distribution that brings a package of another name."""

DISTRIBUTIONS = {
    "aiohttp": "textual-serve",
    "dynamo": "ai-dynamo-runtime",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "textual_serve": "textual-serve",
    "zmq": "pyzmq",
}
