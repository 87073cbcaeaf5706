"""Records as text for a terminal, and as a page for a browser.

Everything here takes records and returns `str`. Text has no colour codes, so that it
reads the same in a log file. No JAX: a plan made beside a TPU is read on a laptop.
"""

from ._audit_text import audit_text as audit_text
from ._budgets_text import budgets_text as budgets_text
from ._calibration_text import calibration_text as calibration_text
from ._comparison_text import comparison_text as comparison_text
from ._differences_page import differences_page as differences_page
from ._differences_text import differences_text as differences_text
from ._fit_text import fit_text as fit_text
from ._inspection_text import inspection_text as inspection_text
from ._notebook import inspection_html as inspection_html
from ._notebook import plan_html as plan_html
from ._page import inspection_page as inspection_page
from ._page_audit import audit_page as audit_page
from ._page_figures import check_page_library as check_page_library
from ._page_fit import fit_page as fit_page
from ._plan_text import plan_text as plan_text
from ._targets_text import TargetRow as TargetRow
from ._targets_text import target_text as target_text
from ._targets_text import targets_text as targets_text
from ._verification_text import verification_text as verification_text
