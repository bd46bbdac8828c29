#include "lockstep.h"

void other_file(void)
{
	lockstep_begin(LOCKSTEP_MARK_EVALUATION);
	lockstep_end(LOCKSTEP_MARK_EVALUATION);
	lockstep_begin(LOCKSTEP_MARK_DATA_LOADING);
}
