/* A CUDA runtime and a cuBLAS without a card: every call succeeds and computes nothing.

   Loaded before torch's libraries (LD_PRELOAD), it lets torch's own C++ run on a machine with no GPU: what torch asks of
   its caching allocator, and what the allocator asks of the card, is then what a card would see. Kernels are not run, and
   no address that is given out may be read. The card is described by environment variables: CARD_CAPABILITY (90 for sm_90),
   CARD_SMS, CARD_BYTES. The same file is built a second time as libcuda.so.1. Names that have nothing to say come from
   `idle.c`, which `stand_in.py` writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>

#define EXPORT __attribute__((visibility("default")))

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static int capability(void) { return (int)setting("CARD_CAPABILITY", 90); }
static int multiprocessors(void) { return (int)setting("CARD_SMS", 132); }
static size_t memory(void) { return (size_t)setting("CARD_BYTES", 85520809984); }
static size_t shared_optin(void) { return capability() == 80 ? 166912 : capability() / 10 == 9 || capability() / 10 == 10 ? 232448 : 101376; }

/* The driver places what it gives as fxmem/memory/allocator/addresses.py says: in the lowest gap that is wide enough,
   else at the start of a new span below all others, what is left of which is a gap. */
static const uintptr_t END = 0x7ffffe000000;
static const size_t SPAN = 32 << 20;
static uintptr_t lowest_address = 0x7ffffe000000;
enum { GAPS = 1 << 16 };
static struct { uintptr_t address; size_t size; } gaps[GAPS];
static unsigned gap_count;
static size_t taken;

/* What is allocated, so that it can be freed: address and size. */
enum { SLOTS = 1 << 16 };
static struct { uintptr_t address; size_t size; } slots[SLOTS];
static unsigned slot(uintptr_t address) { return (unsigned)(address >> 21) % SLOTS; }

static void open_gap(uintptr_t address, size_t size) {
  unsigned at = 0;
  while (at < gap_count && gaps[at].address < address) at++;
  int joins_next = at < gap_count && gaps[at].address == address + size;
  int joins_last = at > 0 && gaps[at - 1].address + gaps[at - 1].size == address;
  if (joins_next && joins_last) {
    gaps[at - 1].size += size + gaps[at].size;
    memmove(gaps + at, gaps + at + 1, (--gap_count - at) * sizeof *gaps);
  } else if (joins_last) {
    gaps[at - 1].size += size;
  } else if (joins_next) {
    gaps[at].address = address;
    gaps[at].size += size;
  } else {
    if (gap_count == GAPS) abort();
    memmove(gaps + at + 1, gaps + at, (gap_count++ - at) * sizeof *gaps);
    gaps[at].address = address;
    gaps[at].size = size;
  }
}

static uintptr_t place(size_t size) {
  for (unsigned at = 0; at < gap_count; at++)
    if (gaps[at].size >= size) {
      uintptr_t address = gaps[at].address;
      gaps[at].address += size;
      if (!(gaps[at].size -= size)) memmove(gaps + at, gaps + at + 1, (--gap_count - at) * sizeof *gaps);
      return address;
    }
  size_t span = (size + SPAN - 1) / SPAN * SPAN;
  lowest_address -= span;
  if (span > size) open_gap(lowest_address + size, span - size);
  return lowest_address;
}

EXPORT int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
EXPORT int cudaGetDevice(int *device) { *device = 0; return 0; }
EXPORT int cudaDriverGetVersion(int *version) { *version = 13020; return 0; }
EXPORT int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
EXPORT const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
EXPORT const char *cudaGetErrorName(int error) { return "standIn"; }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
EXPORT int cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:00:00.0"); return 0; }

EXPORT int cudaGetDeviceProperties(struct cudaDeviceProp *card, int device) {
  memset(card, 0, sizeof *card);
  snprintf(card->name, sizeof card->name, "%s", getenv("CARD_NAME") ? getenv("CARD_NAME") : "stand-in");
  card->major = capability() / 10;
  card->minor = capability() % 10;
  card->multiProcessorCount = multiprocessors();
  card->totalGlobalMem = memory();
  card->sharedMemPerBlock = 49152;
  card->sharedMemPerBlockOptin = shared_optin();
  card->sharedMemPerMultiprocessor = shared_optin() + 1024;
  card->regsPerBlock = card->regsPerMultiprocessor = 65536;
  card->warpSize = 32;
  card->maxThreadsPerBlock = 1024;
  card->maxThreadsPerMultiProcessor = capability() % 10 == 6 || capability() == 89 || capability() == 120 ? 1536 : 2048;
  card->maxBlocksPerMultiProcessor = 32;
  card->maxThreadsDim[0] = card->maxThreadsDim[1] = 1024;
  card->maxThreadsDim[2] = 64;
  card->maxGridSize[0] = 2147483647;
  card->maxGridSize[1] = card->maxGridSize[2] = 65535;
  card->l2CacheSize = 50 << 20;
  card->textureAlignment = 512;
  card->unifiedAddressing = card->managedMemory = card->concurrentKernels = card->cooperativeLaunch = 1;
  return 0;
}

/* The name of it in CUDA 12. */
EXPORT int cudaGetDeviceProperties_v2(struct cudaDeviceProp *card, int device) { return cudaGetDeviceProperties(card, device); }
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  struct cudaDeviceProp card;
  cudaGetDeviceProperties(&card, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = card.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = card.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = card.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)card.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)card.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)card.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *value = card.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return 0;
}

EXPORT int cudaMalloc(void **address, size_t size) {
  if (taken + size > memory()) { *address = NULL; return 2; }
  uintptr_t made = place(size);
  unsigned at = slot(made);
  while (slots[at].size) at = (at + 1) % SLOTS;
  slots[at].address = made;
  slots[at].size = size;
  taken += size;
  *address = (void *)made;
  return 0;
}
EXPORT int cudaFree(void *address) {
  for (unsigned n = 0, at = slot((uintptr_t)address); n < SLOTS; n++, at = (at + 1) % SLOTS)
    if (slots[at].size && slots[at].address == (uintptr_t)address) {
      taken -= slots[at].size;
      open_gap(slots[at].address, slots[at].size);
      slots[at].size = 0;
      break;
    }
  return 0;
}
EXPORT int cudaHostAlloc(void **address, size_t size, unsigned flags) { *address = calloc(1, size); return 0; }
EXPORT int cudaMemGetInfo(size_t *available, size_t *total) { *total = memory(); *available = memory() - taken; return 0; }

static int copy(void *to, size_t size, int kind) {
  if (kind == cudaMemcpyDeviceToHost) memset(to, 0, size);
  return 0;
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, size, kind); }
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, size, kind); }

EXPORT int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  int on_card = (uintptr_t)address >= lowest_address && (uintptr_t)address < END;
  found->type = on_card ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = (void *)address;
  return 0;
}

static int handle(void **made) { *made = calloc(1, 4096); return 0; }
EXPORT int cudaStreamCreate(void **made) { return handle(made); }
EXPORT int cudaStreamCreateWithFlags(void **made, unsigned flags) { return handle(made); }
EXPORT int cudaStreamCreateWithPriority(void **made, unsigned flags, int priority) { return handle(made); }
EXPORT int cudaEventCreate(void **made) { return handle(made); }
EXPORT int cudaEventCreateWithFlags(void **made, unsigned flags) { return handle(made); }
EXPORT int cudaEventElapsedTime(float *passed, void *start, void *end) { *passed = 1; return 0; }
static void *capturing;
EXPORT int cudaStreamBeginCapture(void *stream, int mode) { capturing = stream; return 0; }
EXPORT int cudaStreamEndCapture(void *stream, void **graph) { capturing = 0; return handle(graph); }
EXPORT int cudaStreamIsCapturing(void *stream, int *status) { *status = stream && stream == capturing; return 0; }
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  *status = stream && stream == capturing;
  if (id) *id = 1;
  return 0;
}
EXPORT int cudaGraphGetNodes(void *graph, void *nodes, size_t *count) { *count = 1; return 0; }
EXPORT int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }

EXPORT int cudaFuncGetAttributes(struct cudaFuncAttributes *kernel, const void *function) {
  memset(kernel, 0, sizeof *kernel);
  kernel->maxThreadsPerBlock = 1024;
  kernel->numRegs = 32;
  kernel->maxDynamicSharedSizeBytes = (int)shared_optin();
  kernel->ptxVersion = kernel->binaryVersion = capability();
  return 0;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) {
  *blocks = threads > 0 ? 2048 / threads : 1;
  return 0;
}
EXPORT int cudaGetSymbolAddress(void **address, const void *symbol) { *address = (void *)END; return 0; }
EXPORT void **__cudaRegisterFatBinary(void *binary) { static void *kept; return &kept; }
EXPORT int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }

static int idle(void) { return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return handle(context); }
EXPORT int cuCtxGetCurrent(void **context) { static int one; *context = &one; return 0; }
EXPORT int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in"; return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 << 20; return 0; }
EXPORT int cuMemAddressReserve(void **address, size_t size, size_t alignment, uintptr_t wanted, unsigned long long flags) {
  *address = (void *)place(size);
  return 0;
}
EXPORT int cuMemCreate(unsigned long long *made, size_t size, const void *properties, unsigned long long flags) {
  if (taken + size > memory()) return 2;
  taken += size;
  *made = size;
  return 0;
}
EXPORT int cuMemRelease(unsigned long long made) { taken -= made; return 0; }

static int entry(const char *symbol, void **function) {
  void *found = dlsym(RTLD_DEFAULT, symbol);
  *function = found ? found : (void *)idle;
  return 0;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags, int *status) {
  if (status) *status = 0;
  return entry(symbol, function);
}
EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
  if (status) *status = 0;
  return entry(symbol, function);
}

EXPORT int cublasCreate_v2(void **made) { return handle(made); }
EXPORT int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return handle(made); }
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return handle(made); }
EXPORT int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t ld) { return handle(made); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *count) {
  memset(results, 0, 96);
  *count = 1;
  return 0;
}
