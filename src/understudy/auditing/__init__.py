"""Audit what is claimed: empirical lower bounds on epsilon, beside the claim. See docs/audit.md."""

from understudy.auditing.audit import AuditFailed, AuditPool, AuditResult, audit
from understudy.auditing.statistics import Evidence

__all__ = ["AuditFailed", "AuditPool", "AuditResult", "Evidence", "audit"]
