// What reduces elements of LS_TYPE: the modules "reduce_<type>".
#include "fold.h"
#include "ll_reduce.h"
#include "pushreduce_bulk.h"
#include "sym.h"
