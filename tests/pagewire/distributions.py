"""`DISTRIBUTIONS` maps packages to the distributions that contain them. It lists only packages whose distribution has
another name.
"""

DISTRIBUTIONS = {
    "aiohttp": "textual-serve",
    "dynamo": "ai-dynamo-runtime",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "textual_serve": "textual-serve",
    "zmq": "pyzmq",
}
