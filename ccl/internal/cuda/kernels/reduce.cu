// What reduces elements of LS_TYPE: the modules "reduce_<type>".
#include "fold.h"
#include "ll12_reduce.h"
#include "ll_reduce.h"
#include "pushreduce.h"
#include "sym.h"
#include "toroot.h"
