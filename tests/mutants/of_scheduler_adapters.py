"""m"""

from tests.mutants.mutation import Module

SCHEDULER_ADAPTERS: tuple[Module, ...] = ()
