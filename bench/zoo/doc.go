// Package zoo is a dozen small training and serving jobs of different shapes, for
// trying verdicts on programs that the pipeline's authors did not write it for.
//
// A job is a stranger to the pipeline: it uses package ccl as any program would, makes
// no marks, and handles errors by one of the habits that frameworks have (Habits). Its
// steps take a known time, most of it asleep, so that several ranks fit on one core. All
// that it computes follows from the job's name: a step's loss has the same bits on all
// ranks and in every run, whatever happens meanwhile, and each rank writes it down.
//
// In flow the environment of a launcher, and a control file by which a conductor makes a
// rank slow, wrong, or end at a chosen moment (Order). Out flow a loss log per rank and
// exit statuses. It knows no verdicts: command zoo injects faults and scores.
package zoo
