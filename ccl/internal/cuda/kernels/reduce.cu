// What reduces elements of LS_TYPE: the modules "reduce_<type>", and "reduce_<type>_peers",
// which stamp by peer.
#ifndef LS_PEERS
#include "fold.h"
#endif
#include "chain_reduce.h"
#include "ll12_reduce.h"
#include "ll_reduce.h"
#include "pushreduce.h"
#include "ring.h"
#include "sym.h"
#include "toroot.h"
