#include "driver.h"

#ifdef THREAD_LOCAL
__thread char of_each_thread[THREAD_LOCAL];
#endif

int main(int argc, char **argv)
{
	if (argc < 4) {
		fprintf(stderr, "usage: driver PLUGIN VERSION SCENE | rank ... | soak EVENTS THREADS | bench | fuzz\n");
		return 2;
	}
	load(argv[1], atoi(argv[2]));
	const char *what = argv[3];
	if (!strcmp(what, "rank"))
		return play_rank(argc - 4, argv + 4);
	if (!strcmp(what, "soak") && argc == 6)
		return soak(strtoull(argv[4], NULL, 10), atoi(argv[5]));
	if (!strcmp(what, "bench"))
		return bench();
	if (!strcmp(what, "fuzz"))
		return fuzz();
	int rc = scene(what);
	if (rc == 0 && argc > 4 && !strcmp(argv[4], "wait"))
		getchar(); /* a test reads meanwhile */
	return rc;
}
