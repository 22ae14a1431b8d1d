"""Creates a NIXL agent and prints its plugins.

It runs in a separate process, because NIXL may kill the process that creates an agent.
"""

import json
import sys

from transfer.errors import AgentError
from transfer.nixl.agent import Agent

if __name__ == "__main__":
    try:
        agent = Agent("pagewire doctor")
        told: dict[str, object] = {"plugins": agent.plugins}
        agent.close()
    except AgentError as error:
        told = {"error": " ".join(str(error).split())}
    sys.stdout.write(f"\n{json.dumps(told)}\n")
