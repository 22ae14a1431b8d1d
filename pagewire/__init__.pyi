from kvcache import *
from kvcache import __version__ as __version__
from pagewire.distribution import ShadowedPackageError as ShadowedPackageError
from scheduler_adapters.base import Pages as Pages
from scheduler_adapters.base import PulledPages as PulledPages
from scheduler_adapters.checkpoints import weights_of_checkpoint as weights_of_checkpoint
from scheduler_adapters.errors import AdapterError as AdapterError
from scheduler_adapters.errors import MissingExtraError as MissingExtraError
from scheduler_adapters.hf.generate import PagedGenerator as PagedGenerator
from scheduler_adapters.loop import ModelRunner as ModelRunner
from scheduler_adapters.loop import Output as Output
from scheduler_adapters.loop import Request as Request
from scheduler_adapters.loop import ServingLoop as ServingLoop
from transfer import *
