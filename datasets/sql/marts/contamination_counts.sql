-- contamination_counts: how much every rule found, for each benchmark and source.
-- Grain: one row per rule, source with a hit (and `all`) and benchmark.
--   rule                varchar  the rule, named after its source
--   drops               boolean  whether its hits leave the training problems, or are only reported
--   source              varchar  where the training problems come from; `all` is the whole training set
--   benchmark           varchar  the benchmark
--   problems            bigint   training problems with a hit
--   benchmark_problems  bigint   benchmark problems that were hit
--   benchmark_size      bigint   benchmark problems in all, those that its data offers and that were not taken too
--   share               double   benchmark_problems / benchmark_size
--   flagged             boolean  tulu3: the share is past its limit; null for other rules
with final as (
    select
        counts.rule,
        rules.drops,
        counts.source,
        counts.benchmark,
        counts.problems,
        counts.benchmark_problems,
        counts.benchmark_size,
        counts.share,
        counts.flagged
    from contamination_totals as counts
    inner join decontamination_rules as rules using (rule)
)

select * from final
