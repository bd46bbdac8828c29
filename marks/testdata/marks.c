/* Marks from two files of one program: they share one recorder. It ends when its input does. */
#include "lockstep.h"
#include <stdio.h>
#include <sys/wait.h>

void other_file(void);

int main(void)
{
	lockstep_step(7);
	lockstep_begin(LOCKSTEP_MARK_CHECKPOINT);
	lockstep_end(LOCKSTEP_MARK_CHECKPOINT);
	if (fork() == 0) {
		lockstep_step(1000); /* the child is not the rank */
		_exit(0);
	}
	wait(NULL);
	other_file();
	printf("%s\n", lockstep_marks_of_process.writer.path);
	fflush(stdout);
	return getchar() == EOF ? 0 : 1;
}
