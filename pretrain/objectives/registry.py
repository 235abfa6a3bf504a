"""All objectives by the name that recipe.json stores."""

from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.masked_language_model import MaskedLanguageModel
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection

KINDS = (MaskedLanguageModel, ReplacedTokenDetection, CausalLanguageModel, PermutationLanguageModel)
OBJECTIVES = {kind.__name__: kind for kind in KINDS}
