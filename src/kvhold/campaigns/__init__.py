"""Fault campaigns: seeded schedules of the real engine, with every live block's bytes checked.

``python -m kvhold.campaigns --duration 60 --seed 0`` runs schedules for a minute, then each seeded
bug until it is caught, then a naive control engine. What a failure prints is code to paste.
"""

from kvhold.campaigns._campaign import Profile, Report, campaign, replay
from kvhold.campaigns._schedule import Outcome, Schedule

__all__ = ["Outcome", "Profile", "Report", "Schedule", "campaign", "replay"]
