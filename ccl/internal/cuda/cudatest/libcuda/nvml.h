// Part of fake.c: NVML, which sees GPUs that the driver does not. A handle is the number of a GPU and one.

API int nvmlInit_v2(void) { setup(); FAULT; return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **h) {
	unsigned domain, at;
	FAULT;
	if (sscanf(bus, "%x:%x:00.0", &domain, &at) != 2 || domain || at < 1 || at > MAX_GPUS) return 6; // not found
	*h = (void *)(uintptr_t)at;
	return 0;
}
API int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) {
	uintptr_t i = (uintptr_t)a - 1, k = (uintptr_t)b - 1;
	FAULT;
	if (i >= MAX_GPUS || k >= MAX_GPUS || i == k || what != 2) return 2; // invalid argument
	*status = (apart[i] | unlinked[i]) >> k & 1 ? 5 : 0; // not supported
	return 0;
}
