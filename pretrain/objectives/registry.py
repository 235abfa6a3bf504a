"""All objectives by the name that recipe.json stores."""

from pretrain.objectives.causal_language_model import CausalLanguageModel
from pretrain.objectives.masked_language_model import MaskedLanguageModel, MaskedWithGlobals
from pretrain.objectives.next_token_prediction import NextTokenPrediction
from pretrain.objectives.permutation_language_model import PermutationLanguageModel
from pretrain.objectives.replaced_token_detection import ReplacedTokenDetection

OBJECTIVES = {
    "causal-language-model": CausalLanguageModel,
    "masked-language-model": MaskedLanguageModel,
    "masked-with-globals": MaskedWithGlobals,
    "next-token-prediction": NextTokenPrediction,
    "permutation-language-model": PermutationLanguageModel,
    "replaced-token-detection": ReplacedTokenDetection,
}
