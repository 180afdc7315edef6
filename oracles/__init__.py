"""The judges: what an engine answered against what it must be. Imports spec only.

judge.judge_op           one call of one operation
session.SessionJudge     whole sessions of one model; session.judge_session for a single one
judgement                Judgement, Verdict, FINDINGS, RUNGS, worst
ledger.explain_margin    which operation moved the margin between two tokens
noise.noise              how far honest rounding moves logits: the statistical bound
ops.BOUNDS               per operation: its bound and its exact checks
"""
