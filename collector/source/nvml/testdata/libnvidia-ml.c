// A libnvidia-ml.so.1 with two GPUs, for the path through the dynamic linker:
// what the source calls is here and no more, so that a call of anything else
// ends the test. With OLD it lacks what came with later drivers; with HANG
// the link states of GPU 1 take for ever.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { unsigned id, scope; long long time, latency; int type, ret; union { double d; unsigned u; u64 ull; } value; } field;
typedef struct { void *device; u64 type, data; unsigned gpu_instance, compute_instance; } event;
typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } process;
typedef struct { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char id[32]; } pci;

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TIMEOUT = 10 };

static int gpus[2], set, sent;

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int ret) { return ret == NOT_SUPPORTED ? "Not Supported" : "other"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { return snprintf(s, n, "580.1"), OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = 2, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { return *d = &gpus[i], OK; }
int nvmlDeviceGetUUID(int *d, char *s, unsigned n) { return snprintf(s, n, "GPU-00010203-0405-0607-0809-0a0b0c0d0e%02x", (int)(d - gpus)), OK; }
int nvmlDeviceGetName(int *d, char *s, unsigned n) { return snprintf(s, n, "NVIDIA H200"), OK; }
int nvmlDeviceGetPciInfo_v3(int *d, pci *p) { return strcpy(p->id, "00000000:18:00.0"), OK; }
int nvmlDeviceGetMaxPcieLinkWidth(int *d, unsigned *v) { return *v = 16, OK; }
int nvmlDeviceGetTemperature(int *d, int sensor, unsigned *v) { return *v = 41, OK; }
int nvmlDeviceGetPowerUsage(int *d, unsigned *v) { return *v = 650500, OK; }
int nvmlDeviceGetEnforcedPowerLimit(int *d, unsigned *v) { return *v = 700000, OK; }
int nvmlDeviceGetTotalEnergyConsumption(int *d, u64 *v) { return *v = 5000000, OK; }
int nvmlDeviceGetClockInfo(int *d, int clock, unsigned *v) { return *v = clock == 1 ? 1980 : 3201, OK; }
int nvmlDeviceGetUtilizationRates(int *d, unsigned *v) { return v[0] = 98, v[1] = 40, OK; }
int nvmlDeviceGetMemoryInfo(int *d, u64 *v) { return v[0] = 100, v[1] = 90, v[2] = 10, OK; }
int nvmlDeviceGetPcieReplayCounter(int *d, unsigned *v) { return *v = 12, OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(int *d, unsigned *v) { return *v = 5, OK; }
int nvmlDeviceGetCurrPcieLinkWidth(int *d, unsigned *v) { return *v = 8, OK; }
int nvmlDeviceGetTotalEccErrors(int *d, int kind, int counter, u64 *v) { return *v = kind * 10 + counter, OK; }
int nvmlDeviceGetNvLinkErrorCounter(int *d, unsigned link, int counter, u64 *v) { return NOT_SUPPORTED; }

#ifdef OLD
int nvmlDeviceGetCurrentClocksThrottleReasons(int *d, u64 *v) { return *v = 0x84, OK; }
#else
int nvmlDeviceGetCurrentClocksEventReasons(int *d, u64 *v) { return *v = 0x84, OK; }
int nvmlDeviceGetRemappedRows(int *d, unsigned *c, unsigned *u, unsigned *p, unsigned *f) { return *c = 2, *u = 1, *p = 1, *f = 0, OK; }
#endif

int nvmlDeviceGetNvLinkState(int *d, unsigned link, int *up) {
#ifdef HANG
	if (d == &gpus[1]) pause();
#endif
	if (link > 17) return INVALID;
	return *up = link != 17, OK;
}

int nvmlDeviceGetFieldValues(int *d, int n, field *f) {
	for (int i = 0; i < n; i++) {
		f[i].ret = OK;
		f[i].type = 3;
		switch (f[i].id) {
		case 91: f[i].type = 1; f[i].value.u = 18; break;
		case 161: case 162: case 163: f[i].value.ull = 1000 * f[i].scope + f[i].id; break;
		default: f[i].ret = NOT_SUPPORTED;
		}
	}
	return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(int *d, unsigned *n, process *p) {
	if (*n < 3) return *n = 3, 7;
	for (int i = 0; i < 3; i++) p[i].pid = 100 + i;
	return *n = 3, OK;
}

int nvmlEventSetCreate(void **s) { return *s = &set, OK; }
int nvmlEventSetFree(void *s) { return OK; }
int nvmlDeviceRegisterEvents(int *d, u64 types, void *s) { return types == 8 && s == &set ? OK : INVALID; }
int nvmlEventSetWait_v2(void *s, event *e, unsigned ms) {
	if (sent++) return usleep(1000 * ms), TIMEOUT;
	e->device = &gpus[1], e->type = 8, e->data = 79;
	return OK;
}
