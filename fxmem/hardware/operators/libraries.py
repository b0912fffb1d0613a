"""Linear algebra, transforms and other work of libraries: LAPACK, cuSOLVER, MAGMA, cuFFT and the FFTs of the CPU.

Neither their FLOPs nor their buffers follow from the shapes.
"""

from fxmem.hardware.operators.registry import Operator, undetermined

_SOLVER = Operator(uncounted="depends on the solver", scratch=undetermined)

ROWS = {
    "BatchLinearAlgebra.cpp, LinearAlgebra.cpp": {
        """_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig
        linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr
        linalg_solve_triangular""": _SOLVER,
        "_linalg_* linalg_* cholesky* _cholesky* lu_* ormqr geqrf triangular_solve": Operator(scratch=undetermined),
        "linalg_cross": Operator(3),  # x1 y2 - x2 y1
        "linalg_pinv": Operator(),
        "_linalg_check_errors": Operator(0),
    },
    "SpectralOps.cpp, mkl/SpectralOps.cpp, cuda/SpectralOps.cpp": {
        "_fft_c2c _fft_c2r _fft_r2c": Operator(
            uncounted="depends on how the library factors the length", scratch=undetermined
        ),
        "_fft_*": Operator(scratch=undetermined),
    },
    "SummaryOps.cpp, Histogram.cpp, Distance.cpp": {
        "histc": Operator((4, 0), scratch=undetermined),  # bins (x - min) / (max - min), and counting
        "histogram": Operator(scratch=undetermined),
        "_cdist_forward _cdist_backward": Operator(
            uncounted="depends on the norm and on whether a matrix product is used"
        ),
    },
}
