"""A generation from a few of its recorded tokens: the others are made by arithmetic and replayed."""

from fxmem.memory.generation.decode_steps import PERIOD as PERIOD
from fxmem.memory.generation.decode_steps import DecodeSteps as DecodeSteps
from fxmem.memory.generation.decode_steps import Events as Events
from fxmem.memory.generation.decode_steps import Extension as Extension
from fxmem.memory.generation.decode_steps import Jump as Jump
from fxmem.memory.generation.decode_steps import TokenReplay as TokenReplay
from fxmem.memory.generation.decode_steps import extend as extend
from fxmem.memory.generation.decode_steps import find_steps as find_steps
from fxmem.memory.generation.decode_steps import name_phases as name_phases
from fxmem.memory.generation.decode_steps import recorded_events as recorded_events
from fxmem.memory.generation.decode_steps import replay_tokens as replay_tokens
from fxmem.memory.generation.decode_steps import requested_by_token as requested_by_token
from fxmem.memory.generation.loop_steps import COMPARED as COMPARED
from fxmem.memory.generation.loop_steps import LEAST_COMPARED as LEAST_COMPARED
from fxmem.memory.generation.loop_steps import EvenSteps as EvenSteps
from fxmem.memory.generation.loop_steps import LoopEvent as LoopEvent
from fxmem.memory.generation.loop_steps import LoopStep as LoopStep
from fxmem.memory.generation.loop_steps import LoopSteps as LoopSteps
from fxmem.memory.generation.loop_steps import find_events as find_events
