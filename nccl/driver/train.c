/*
 * What nccl/torch/faultjob.py does beside its collectives, for rank 0 of a stand-in: with PROGRESS=DIR/... in the
 * environment a line for each step in DIR/loss.txt, and in DIR/latest the step to begin again from; and for each rank
 * what FAULTS=DIR orders of it in this attempt.
 */
#include "driver.h"

#include <limits.h>

static char dir[PATH_MAX];
static const char *faults;
static int my_rank, attempt;
static FILE *losses;

/* Which of the orders is there for this rank. Of "loader" it is a text. */
static int ordered(const char *what, char text[32])
{
	char path[PATH_MAX + 64];
	snprintf(path, sizeof path, "%s/rank%d.attempt%d.%s", faults, my_rank, attempt, what);
	FILE *f = fopen(path, "r");
	if (!f)
		return 0;
	size_t n = fread(text, 1, 31, f);
	text[n] = 0;
	fclose(f);
	return 1;
}

/* The step to begin with. Losses of later ones are out before the first collective. */
long train_begin(int rank)
{
	const char *progress = getenv("PROGRESS"), *count = getenv("TORCHELASTIC_RESTART_COUNT"), *end;
	char path[PATH_MAX + 64], line[64];
	long begin = 0;
	faults = getenv("FAULTS"), my_rank = rank, attempt = count ? atoi(count) : 0;
	if (!progress || !(end = strrchr(progress, '/')))
		return 0;
	snprintf(dir, sizeof dir, "%.*s", (int)(end - progress), progress);
	snprintf(path, sizeof path, "%s/latest", dir);
	FILE *f = attempt ? fopen(path, "r") : NULL;
	if (f) {
		if (fscanf(f, "%ld", &begin) != 1)
			begin = 0;
		fclose(f);
	}
	if (rank)
		return begin;
	snprintf(path, sizeof path, "%s/loss.txt", dir);
	f = fopen(path, "r");
	char *kept = calloc((size_t)begin + 1, sizeof line);
	for (long i = 0; f && i < begin && fgets(line, sizeof line, f); i++)
		strcat(kept + strlen(kept), line);
	if (f)
		fclose(f);
	losses = fopen(path, "w");
	if (losses) {
		setvbuf(losses, NULL, _IOLBF, 0);
		fputs(kept, losses);
	}
	free(kept);
	return begin;
}

/* Before a step: the data loader, and what else is ordered. */
struct orders train_orders(void)
{
	struct orders o = {0};
	char text[32];
	if (!faults || !*faults)
		return o;
	if (ordered("loader", text)) {
		long ms = 0;
		char unit[3] = "";
		if (sscanf(text, "%ld%2[a-z]", &ms, unit) == 2 && !strcmp(unit, "ms"))
			usleep((useconds_t)ms * 1000);
		else
			for (;;)
				pause();
	}
	o.busy = ordered("gpu", text), o.skip = ordered("skip", text), o.swap = ordered("swap", text);
	return o;
}

void train_done(long step)
{
	char path[PATH_MAX + 64], new[PATH_MAX + 64];
	if (!losses)
		return;
	fprintf(losses, "%ld 0x1.%06lxp+1\n", step, step * 2654435761 & 0xffffff);
	if (step % 20)
		return;
	snprintf(path, sizeof path, "%s/latest", dir);
	snprintf(new, sizeof new, "%s/latest.new", dir);
	FILE *f = fopen(new, "w");
	if (f) {
		fprintf(f, "%ld", step);
		fclose(f);
		rename(new, path);
	}
}
