-- int_template_ngrams: runs of n words that are the wording of a whole family, not of one question.
-- A run is wording when more than a fifth of some benchmark family's questions (at least two of them)
-- hold it, and more than a fifth of some training family's questions (at least ten of them). It then
-- tells no benchmark question from the next, so sharing it proves nothing.
--   A fifth, because the first number of a question follows its wording: a one-digit number makes
--   "... problem: 7" a run in 10 % of the questions, and must stay content.
--   Both sides, because a passage that many benchmark questions quote is content as long as few
--   training questions quote it, and a question that was leaked once is never a fifth of its family.
-- Grain: one row per n-gram.
--   ngram  varchar  n words, joined by spaces
with benchmark_families as (
    select family, count(*) as questions
    from int_benchmark_candidates
    group by family
),

training_families as (
    select family, count(*) as questions
    from int_training_copies
    where copy = 1
    group by family
),

benchmark_wording as (
    select int_benchmark_ngrams.ngram
    from int_benchmark_ngrams
    inner join benchmark_families using (family)
    group by int_benchmark_ngrams.ngram, family, benchmark_families.questions
    having count(distinct problem_id) >= 2 and count(distinct problem_id) > 0.2 * benchmark_families.questions
),

training_wording as (
    select int_shared_ngrams.ngram
    from int_shared_ngrams
    inner join training_families using (family)
    group by int_shared_ngrams.ngram, family, training_families.questions
    having count(distinct problem_id) >= 10 and count(distinct problem_id) > 0.2 * training_families.questions
),

final as (
    select ngram from benchmark_wording
    intersect
    select ngram from training_wording
)

select * from final
