// Package launcher reads from the environment what a launcher has told a process:
// which job it belongs to, which rank it is, on which node, in which attempt.
//
// In: variables, by a function like os.LookupEnv. Out: an Identity, and the name of
// the launcher. The innermost launcher wins: torchrun inside srun is torchrun. One
// table (Launchers) has every launcher's variables; the C header
// marks/c/lockstep_launcher.h and the Python table are generated from it, so that a
// rank is the same in each language.
//
// The package starts nothing, dials nobody, and trusts nothing of what it reads
// beyond its form: a number that is none is an error, names are made to fit.
package launcher

//go:generate go run ./internal/genlauncher -c ../marks/c/lockstep_launcher.h -py ../marks/python/lockstep/_launchers.py
