"""m"""

from tests.mutants.mutation import Module

TRANSFER: tuple[Module, ...] = ()
