"""From measurements to the law's parameters, to predictions, to what they mean."""

from xstage_lab.analysis.advice import Answer, Outcome
from xstage_lab.analysis.calibration import PARAMETERS, Calibration, Sample, published
from xstage_lab.analysis.candidates import Choice
from xstage_lab.analysis.comparison import Comparison, compare, error_text, measured_regime
from xstage_lab.analysis.explanation import explain, unsure_words
from xstage_lab.analysis.interleaving import Interleaving, two_layers, verdict
from xstage_lab.analysis.judgement import Verdict, judge
from xstage_lab.analysis.moe import predict_moe_map
from xstage_lab.analysis.prediction import Prediction, measure_t_mma, predict
from xstage_lab.analysis.protocol import EXPECTED_SAMPLES, calibrate, experiments
from xstage_lab.analysis.shares import Shares, measured_shares, predicted_shares
from xstage_lab.analysis.space import Space
from xstage_lab.analysis.tilings import PredictedMap, predict_map, t_mma_roofline
from xstage_lab.analysis.timings import explain_timings, predict_timings
from xstage_lab.analysis.tuner import Trial, search, tune
from xstage_lab.analysis.ulysses_step import StepCosts, UlyssesStep, ulysses_step

__all__ = [
    "EXPECTED_SAMPLES",
    "PARAMETERS",
    "Answer",
    "Calibration",
    "Choice",
    "Comparison",
    "Interleaving",
    "Outcome",
    "PredictedMap",
    "Prediction",
    "Sample",
    "Shares",
    "Space",
    "StepCosts",
    "Trial",
    "UlyssesStep",
    "Verdict",
    "calibrate",
    "compare",
    "error_text",
    "experiments",
    "explain",
    "explain_timings",
    "judge",
    "measure_t_mma",
    "measured_regime",
    "measured_shares",
    "predict",
    "predict_map",
    "predict_moe_map",
    "predict_timings",
    "predicted_shares",
    "published",
    "search",
    "t_mma_roofline",
    "tune",
    "two_layers",
    "ulysses_step",
    "unsure_words",
    "verdict",
]
