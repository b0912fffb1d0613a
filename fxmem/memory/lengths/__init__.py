"""Steps whose sizes are functions of the lengths of their batches: proved from a few recorded ones, then replayed."""

from fxmem.memory.lengths.forms import Features as Features
from fxmem.memory.lengths.forms import Lengths as Lengths
from fxmem.memory.lengths.forms import find_form as find_form
from fxmem.memory.lengths.profile_forms import POWERS as POWERS
from fxmem.memory.lengths.profile_forms import LoggedStep as LoggedStep
from fxmem.memory.lengths.profile_forms import ProfileForms as ProfileForms
from fxmem.memory.lengths.step_forms import BlockRequest as BlockRequest
from fxmem.memory.lengths.step_forms import LengthsUnproved as LengthsUnproved
from fxmem.memory.lengths.step_forms import LongRun as LongRun
from fxmem.memory.lengths.step_forms import StepForms as StepForms
from fxmem.memory.lengths.step_forms import replay_lengths as replay_lengths
