-- int_held_out_problems: the questions that no training problem may overlap: the benchmarks, and what their data offers beyond.
-- A file, table or data set is a benchmark as a whole, of which `benchmark_size` problems are taken; what a generator
-- made beyond those taken is no benchmark.
-- Grain: one row per problem_id.
--   as in int_benchmark_candidates
with final as (
    select * from int_benchmark_problems
    union all
    select *
    from int_benchmark_candidates
    where
        problem_id not in (select problem_id from int_benchmark_problems)
        and source not in (select source from generated_sources)
)

select * from final
